"""Kernels of the dense networks: forward, backward, loss and update."""
