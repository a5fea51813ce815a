"""Predicts iteration times on many nodes by a model fitted to records, never a measurement. Imports no torch."""
