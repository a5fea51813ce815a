"""GPU kernels, each beside the plain PyTorch function that it equals.

A public function runs its Triton kernel on CUDA tensors and its plain twin on all others. No kernel synchronises with
the GPU or tunes itself at run time, so all of them can be captured into a CUDA graph.
"""
