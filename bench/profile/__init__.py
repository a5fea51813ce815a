"""Runs under a profiler, and what their traces show."""
