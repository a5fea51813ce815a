"""One run of the benchmark, its clock, its log and its record."""
