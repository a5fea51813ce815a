"""HSTU: a ranking model over users' histories, on TorchRec's unpooled embeddings. See config.py."""
