"""Imported by the fork server: numba compiles DLRMv4's loops there once, and not for seconds in each rank."""

from dlrm_bench.dlrm.dlrmv4.data.builder import compile_ahead

compile_ahead()
