"""TorchRec models of several kinds, typical of its users, on random batches at small sizes."""
