"""Compares runs: what differs between their records, by how much, and whether that is proven. No torch."""
