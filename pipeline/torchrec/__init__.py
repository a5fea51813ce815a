"""Pipelines over TorchRec's own modules: stock, and with the five-stage schedule."""
