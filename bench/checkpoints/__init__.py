"""A run's state on disk and in memory: checkpoints, snapshots, and runs that resume or restart from them."""
