"""Runs under a profiler, and the analysis of their traces."""
