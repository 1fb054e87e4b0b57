#!/usr/bin/env bash
# Tests with the real nvidia-modelopt, without a GPU. Usage: ci/modelopt.sh [pytest arguments]
#
# They have an environment of their own, .venv-modelopt, because every Megatron imports it where it is installed, and
# those of 0.17 and 0.18 cannot train from their wheel alone then; all else is shared with .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh modelopt
if outdated pyproject.toml ci/constraints.txt; then
  install -c ci/constraints.txt -r <(extras modelopt)
fi
[ $# -gt 0 ] || set -- tests/megatron/test_modelopt.py
run_tests "$@"
