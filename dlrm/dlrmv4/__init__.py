"""DLRMv4, MLPerf Training's recommender from round 6.1 on: an HSTU model of users' histories of music events."""
