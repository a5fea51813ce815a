"""Descriptions of the machine, the packages and the source that a record needs."""
