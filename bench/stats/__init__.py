"""Statistics of runs of numbers: intervals, tests, power; numpy and scipy alone."""
