# DGX H200: like a DGX H100, but with 141 GB of memory per GPU. Sourced by node.sh.
. "$ROOT/launch/slurm/dgx-h100.sh"
