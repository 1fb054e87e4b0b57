#!/usr/bin/env bash
# Plugin beside upstream context parallelism, both against one rank. Usage: ci/parity/run.sh [--short | --all | --case GLOB]
# (--help has the rest.) PYTHON: an environment that has everything, instead of .venv; on GPUs one with Transformer Engine.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
  bash ci/environment.sh dev
  PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/tests:$PWD/tests/megatron${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}" PYTORCH_NVML_BASED_CUDA_CHECK=1 # ranks are forked before CUDA is touched
exec "$PYTHON" ci/parity/run.py "$@"
