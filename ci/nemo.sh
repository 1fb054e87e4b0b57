#!/usr/bin/env bash
# Tests with the real Megatron-Bridge, without a GPU. Usage: ci/nemo.sh [pytest arguments]   (default: tests/nemo)
#
# They have an environment of their own, .venv-nemo, because Bridge asks for older packages than .venv has, and every
# Megatron imports some of them where they are installed; all else is shared with .venv. Of what Bridge's wheel lists,
# only what its GPT training imports is installed: the rest is CUDA code, or for other models. Transformer Engine goes
# in as well where it has been built (ci/te.sh builds it); one test needs it, and says so where it is not there.
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
