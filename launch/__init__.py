"""Entry points of torchrun and Slurm."""
