"""Input and output dists without what fixed multi-hot sizes make constant."""
