"""Ceilings of a machine, and the least time of an iteration by them."""
