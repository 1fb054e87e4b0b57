#!/usr/bin/env bash
# Tests with the real nvidia-modelopt, without a GPU. Usage: ci/modelopt.sh [pytest arguments]
#
# Uses its own environment, .venv-modelopt, because Megatron imports modelopt wherever it is installed, and then the
# wheel of 0.18 cannot train by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh modelopt
if outdated pyproject.toml ci/constraints.txt; then
  install -c ci/constraints.txt -r <(extras modelopt)
fi
[ $# -gt 0 ] || set -- tests/megatron/mixers/test_modelopt.py
run_tests "$@"
