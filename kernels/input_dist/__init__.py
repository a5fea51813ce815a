"""Kernels of the input dist: move ids from host memory to their tables' owner ranks, where they are picked and
sorted."""
