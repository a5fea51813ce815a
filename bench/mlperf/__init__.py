"""MLPerf's log, rules, published results and submissions."""
