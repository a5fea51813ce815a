"""Submissions: ten runs arranged by MLPerf's rules, the findings of its checkers, and the score.

dlrm-bench submission build|check|score
"""
