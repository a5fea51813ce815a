"""The model: configuration, data, sharded embeddings, dense network, AUC."""
