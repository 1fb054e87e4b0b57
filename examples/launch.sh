#!/usr/bin/env bash
# Start one of the papers' experiments on the GPUs of this node by torchrun. Run the same command on every node.
#
#   bash examples/launch.sh EXAMPLE [VARIANT [SEQ_LENGTH]] [more Megatron flags]
#
# `cp-plugin example` lists the examples. NODE_RANK, MASTER_ADDR, DATA_PREFIX, CHECKPOINTS and other variables are
# described at the top of the self-contained script that runs here: cp-plugin example EXAMPLE --print sh
set -euo pipefail
(($#)) || { echo "launch.sh: which example? cp-plugin example lists them" >&2 && exit 2; }
chosen=("$1")
shift
for option in --variant --seq-length; do
  if (($#)) && [[ $1 != -* ]]; then
    chosen+=("$option" "$1")
    shift
  fi
done
script=$(python -m cp_plugin.cli example "${chosen[@]}" --print sh)
exec bash -c "$script" launch.sh "$@"
