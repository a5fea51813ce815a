"""Rows that come into being when their ids are first named."""
