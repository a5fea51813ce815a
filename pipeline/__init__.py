"""The five stages of an iteration in time: pipelines over TorchRec's modules, and one of fixed shapes."""
