"""Criteo's samples in MLPerf's day files: reading, generating and checking them."""
