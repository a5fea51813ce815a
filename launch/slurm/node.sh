#!/usr/bin/env bash
# Runs on each node, once, under srun (train.sbatch): takes the machine's settings, describes the node beside the record,
# and starts a rank for each GPU through torchrun. Nodes are numbered as Slurm numbers them, so that ranks count through
# one node after another.
set -euo pipefail
cd "$ROOT"
# Compiled kernels need no sharing between nodes; the next job on a node takes those of the last.
caches=${TMPDIR:-/tmp}/dlrm-bench-$(id -u)
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton
. "$SYSTEM_FILE"
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python

# Clocks, power, links and processors, as they are before the run; what a node lacks is left out.
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
# The run made the folder, or refused to: a description alone is no record.
[ ! -d "$RECORD" ] || printf '%s\n' "$description" > "$RECORD/node-$SLURM_NODEID.txt"
exit "$status"
