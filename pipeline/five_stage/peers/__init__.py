"""Exchanges of an iteration's graph through memory that all GPUs of a node read and write, in place of collectives."""
