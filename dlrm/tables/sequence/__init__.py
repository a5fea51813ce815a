"""Embedding tables whose rows are looked up one by one, in fixed shapes."""
