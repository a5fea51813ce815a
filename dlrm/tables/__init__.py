"""Sharded embedding tables, and their shared modules."""
