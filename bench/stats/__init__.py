"""Statistics of runs that are compared: ratios with intervals and tests, several comparisons together, drift."""

__version__ = "0.2.1"
