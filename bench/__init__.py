"""One run of the benchmark, and the tools that read its record: comparisons, ladders, reports."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Path of the checkout, or of the folder that pip installed."""
