"""What an iteration would take on many nodes: a model fitted to records, never a measurement. Imports no torch."""
