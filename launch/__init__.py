"""What torchrun and Slurm start."""
