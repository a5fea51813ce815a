"""Benchmark of every kernel against its plain function: python -m dlrm_bench.kernels.benchmark."""
