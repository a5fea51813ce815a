"""Rungs, and the runs that make a ladder of them."""
