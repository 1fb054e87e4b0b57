#!/usr/bin/env bash
# Apply each patch of patches/megatron-lm to its Megatron, and train a script that does not know the plugin with flags
# only: 2 ranks against 1. Usage: ci/patches.sh [VERSION | DIRECTORY...]
#
# DIRECTORY         a Megatron-LM checkout with a compiled dataset helper, such as one of its main
# MEGATRON_LM_PATH  a checkout: its own pretrain_gpt.py is used with the patched Megatron of the same minor version
# MEGATRON_LM_GIT   a git directory of Megatron-LM: the patch for main must apply to it
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
[ $# -gt 0 ] || set -- 0.18.2 0.19.2
for version; do
  [ -d "$version" ] || bash ci/megatron/overlay.sh "$version" >/dev/null
done
PYTHONPATH="$PWD:$PWD/kernels:$PWD/tests" OMP_NUM_THREADS=1 .venv/bin/python ci/megatron/try_patches.py "$@"
