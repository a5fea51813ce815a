#!/usr/bin/env bash
# Runs once on each node, under srun (train.sbatch): loads the system's settings, describes the node beside the record,
# and starts one rank per GPU through torchrun. Nodes are numbered by Slurm, so that ranks count through one node after
# another.
set -euo pipefail
cd "$ROOT"
# Compiled kernels need not be shared between nodes; a later job on the same node reuses them.
caches=${TMPDIR:-/tmp}/dlrm-bench-$(id -u)
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton
. "$SYSTEM_FILE"
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python

# Clocks, power, links and processors before the run; commands that a node lacks are skipped.
describe() {
  echo "node $SLURM_NODEID of $SLURM_JOB_NUM_NODES: $(hostname), $(date -u +%FT%TZ)"
  for command in "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE" "nvidia-smi topo -m" "ibstat" "lscpu" "numactl -H"; do
    if command -v "${command%% *}" > /dev/null; then printf '\n$ %s\n' "$command"; $command 2>&1 || true; fi
  done
  printf '\n$ settings\n'; env | grep -E '^(NCCL|GLOO|CUDA|OMP|TORCH)' | sort
}
description=$(describe)

status=0
"$python" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
  --nproc-per-node "$RANKS_PER_NODE" --master-addr "$HEAD" --master-port "$PORT" "${BINDING[@]}" \
  ${PROGRAM:-launch/dlrm.py} "$@" || status=$?
# The run creates the folder unless it refuses to start: a description alone is not a record.
[ ! -d "$RECORD" ] || printf '%s\n' "$description" > "$RECORD/node-$SLURM_NODEID.txt"
exit "$status"
