"""Which rank holds which table, or which part of it, and the cost of that."""
