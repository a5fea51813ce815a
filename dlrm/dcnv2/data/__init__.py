"""Criteo's samples in MLPerf's day files: reading, making and checking them."""
