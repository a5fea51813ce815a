"""Sharded embedding tables, and the modules that they share."""
