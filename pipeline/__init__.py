"""The schedules of the five stages: pipelines over TorchRec's modules, and pipelines of fixed shapes."""
