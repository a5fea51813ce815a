"""Ladders: rungs, their runs, and the comparisons of their rounds."""
