"""The pipeline of fixed shapes: one CUDA graph an iteration."""
