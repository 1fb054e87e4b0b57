#!/usr/bin/env bash
# Tests against the real Transformer Engine, without a GPU. Usage: ci/te.sh [pytest arguments]   (default: tests/te)
#
# Uses its own environment, .venv-te, because Megatron behaves differently if TE can be imported. The first call builds TE (ci/gpu/build_te.sh: nine minutes on two cores, needs nvcc).
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh te --without-pip
bash ci/gpu/build_te.sh "$python"
eval "$(bash ci/gpu/build_te.sh --env "$python")"
[ $# -gt 0 ] || set -- tests/te
run_tests "$@"
