"""Comparisons of records and of MLPerf's published logs. No torch."""
