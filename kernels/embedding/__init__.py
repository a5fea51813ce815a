"""Kernels of embedding forward and backward: lookup, the ways of pooled vectors and their gradients, table update."""
