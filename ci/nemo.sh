#!/usr/bin/env bash
# Tests with the real Megatron-Bridge, without a GPU. Usage: ci/nemo.sh [pytest arguments]   (default: tests/nemo)
#
# Uses its own environment, .venv-nemo, because Bridge requires older packages than .venv has, some of which Megatron
# imports wherever they are installed. Of Bridge's dependencies only those of its GPT training are installed: the rest is
# CUDA code, or for other models. Transformer Engine is added if it has been built (ci/te.sh); one test needs it.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh nemo
if outdated ci/nemo.txt ci/constraints.txt; then
  pinned() { sed -n "/^$1==/p" ci/constraints.txt; }
  pip_install --no-warn-conflicts -r ci/nemo.txt "$(pinned nvidia-modelopt)"
  install --no-warn-conflicts --no-deps "$(pinned megatron-bridge)"
fi
if bash ci/gpu/build_te.sh --cached "$python"; then
  bash ci/gpu/build_te.sh "$python"
  eval "$(bash ci/gpu/build_te.sh --env "$python")"
fi
echo "ci/nemo.sh: environment ready after $((SECONDS - began)) s"
[ $# -gt 0 ] || set -- tests/nemo
run_tests "$@"
