"""The placement of tables and their parts on ranks, and its cost."""
