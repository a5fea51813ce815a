"""Times of every kernel beside its plain function: python -m dlrm_bench.kernels.benchmark."""
