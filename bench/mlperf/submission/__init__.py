"""Submissions: ten runs arranged as MLPerf's rules say, what its checkers find in them, and the score.

dlrm-bench submission build|check|score
"""
