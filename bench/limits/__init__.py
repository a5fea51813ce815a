"""Ceilings of a machine, and the least time of an iteration that they leave."""
