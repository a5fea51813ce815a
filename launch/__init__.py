"""Entry points for torchrun and Slurm."""
