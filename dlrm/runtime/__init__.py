"""Ranks, their topology, and the memory and exchanges between them."""
