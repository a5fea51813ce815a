"""TorchRec models of several kinds, on batches drawn at random: what users of TorchRec train, at small sizes."""
