"""The pipeline of fixed shapes, in which one CUDA graph can hold an iteration."""
