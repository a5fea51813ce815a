"""Kernels of the input dist: ids from the host's memory to the ranks of their tables, picked and sorted there."""
