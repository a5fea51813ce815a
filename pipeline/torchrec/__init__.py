"""Pipelines over TorchRec's own modules: stock, and under the five-stage schedule."""
