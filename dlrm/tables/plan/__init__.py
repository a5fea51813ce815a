"""The placement of tables, and of parts of them, on ranks, and its cost."""
