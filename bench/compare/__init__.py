"""What records say once they exist: comparisons, ladders, floors, MLPerf logs of others. No torch."""
