"""Rows that are created when a batch first names their ids."""
