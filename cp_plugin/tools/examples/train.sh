#!/usr/bin/env bash
# @title@, variant @variant@.
# Start the ranks of this node with torchrun. Run the same command on every node.
#
#   bash train.sh [more Megatron flags]
#
# Environment variables (examples/launch.sbatch of the repository sets all of them under Slurm):
#   NNODES, GPUS_PER_NODE   default @nodes@ and @per_node@; with others, append the sizes that differ, such as
#                           --context-parallel-size 8 --cp-grid 2x4
#   NODE_RANK, MASTER_ADDR  with several nodes: the index of this node, from 0, and the host name of node 0
#   MASTER_PORT             on that node; default 29500
#   DATA_PREFIX             a Megatron dataset, without .bin; default: Python's standard library, as text
#   CHECKPOINTS             a shared folder to save to and resume from; default: nothing is saved
#   RESUME                  a folder to load from instead
#   WORK                    a shared folder for the default dataset and caches; default ./out/@name@
#   MEGATRON_LM_PATH        a Megatron-LM checkout whose pretrain_gpt.py to run; default: the megatron-core package
# Rendered from config.yaml by: cp-plugin example @name@ --variant @variant@ --print sh
set -euo pipefail

fail() {
  echo "train.sh: $1" >&2
  exit 2
}

flags=(
@flags@
)
saving=(--save-interval 100)

NNODES=${NNODES:-@nodes@}
GPUS_PER_NODE=${GPUS_PER_NODE:-@per_node@}
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || fail "NNODES='$NNODES': set it to the number of nodes"
[[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE='$GPUS_PER_NODE': set it to the number of GPUs of a node"
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
if ((NNODES == 1)); then
  NODE_RANK=${NODE_RANK:-0}
  MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
fi
[[ -n $NODE_RANK ]] || fail "NODE_RANK is not set: the number of this node, 0 to $((NNODES - 1))"
[[ $NODE_RANK =~ ^[0-9]+$ ]] || fail "NODE_RANK=$NODE_RANK: give 0 to $((NNODES - 1))"
((NODE_RANK < NNODES)) || fail "NODE_RANK=$NODE_RANK: give 0 to $((NNODES - 1))"
[[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR is not set: the host name or address of the node with NODE_RANK=0"
MASTER_PORT=${MASTER_PORT:-29500}
command -v torchrun >/dev/null || fail "torchrun is not on the PATH: activate the environment that has torch and cp-plugin"

WORK=${WORK:-$PWD/out/@name@}
mkdir -p "$WORK"
if [[ -z ${DATA_PREFIX:-} ]]; then
  DATA_PREFIX=$WORK/stdlib_text_document
  if ((NODE_RANK == 0)); then
    python -m cp_plugin.tools dataset "$WORK/stdlib"
  fi
  for ((i = 0; i < 900; i++)); do # node 0 writes it; the .json comes last
    [[ -e $DATA_PREFIX.json ]] && break
    sleep 2
  done
fi
[[ -e $DATA_PREFIX.idx ]] || fail "DATA_PREFIX=$DATA_PREFIX: there is no $DATA_PREFIX.idx; cp-plugin dataset writes one"
flags+=(--data-path "$DATA_PREFIX" --data-cache-path "$WORK/cache")

checkpoints=()
if [[ -n ${CHECKPOINTS:-} ]]; then
  # on SIGTERM the signal handler saves a checkpoint and ends the training
  checkpoints+=(--save "$CHECKPOINTS" --exit-signal-handler "${saving[@]}")
fi
if [[ -n ${RESUME:-} ]]; then
  [[ -e $RESUME/latest_checkpointed_iteration.txt ]] || fail "RESUME=$RESUME: there is no checkpoint in it"
  checkpoints+=(--load "$RESUME")
elif [[ -n ${CHECKPOINTS:-} ]]; then
  checkpoints+=(--load "$CHECKPOINTS") # from an empty folder training starts at the beginning
fi

if [[ -n ${MEGATRON_LM_PATH:-} ]]; then
  [[ -f $MEGATRON_LM_PATH/pretrain_gpt.py ]] || fail "MEGATRON_LM_PATH=$MEGATRON_LM_PATH: there is no pretrain_gpt.py in it"
  program=(-m cp_plugin.run "$MEGATRON_LM_PATH/pretrain_gpt.py")
else
  program=(-m cp_plugin.pretrain_gpt)
fi

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-@connections@} # Megatron demands 1, with FSDP more
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Triton's compiled kernels on a local disk: the home folder of 64 ranks is one network file system
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$(id -un)}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # long sequences: less fragmentation

# USR1, which launch.sbatch sends before the time limit, becomes SIGTERM for the ranks but not for torchrun, which would
# kill ranks that have not saved within 30 seconds.
(
  trap '' USR1
  exec torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "${program[@]}" \
    "${flags[@]}" "${checkpoints[@]}" "$@"
) &
torchrun=$!
stop_ranks() {
  for ranks in /proc/"$torchrun"/task/*/children; do
    # shellcheck disable=SC2046 # numbers
    kill -TERM $(<"$ranks") 2>/dev/null || true
  done
}
trap stop_ranks USR1
trap 'kill -TERM "$torchrun" 2>/dev/null || true' INT TERM
while true; do
  status=0
  wait "$torchrun" || status=$?
  kill -0 "$torchrun" 2>/dev/null || break # otherwise a signal has interrupted the wait
done
exit "$status"
