"""Sharded embedding-bag collections and what they share."""
