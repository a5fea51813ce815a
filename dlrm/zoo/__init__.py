"""TorchRec models of several kinds, as its users train, on random batches at small sizes."""
