"""Input and output dists without the exchanges that fixed multi-hot sizes make redundant."""
