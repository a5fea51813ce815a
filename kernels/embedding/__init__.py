"""Kernels of embedding forward and backward: lookup, exchange of pooled vectors and gradients, table update."""
