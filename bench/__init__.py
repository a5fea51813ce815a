"""One run of the benchmark, and everything that is made of runs: records, comparisons, ladders, reports."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, or the folder that pip installed."""
