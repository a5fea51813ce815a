# DGX H200: a DGX H100 but for the memory of its GPUs, 141 GB each. Sourced by node.sh.
. "$ROOT/launch/slurm/dgx-h100.sh"
