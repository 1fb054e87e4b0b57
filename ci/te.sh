#!/usr/bin/env bash
# Tests against the real Transformer Engine, without a GPU. Usage: ci/te.sh [pytest arguments]   (default: tests/te)
#
# They have an environment of their own, .venv-te, because Megatron works differently where TE can be imported; all
# else is shared with .venv. The first call builds TE (ci/gpu/build_te.sh: nine minutes on two cores, needs nvcc).
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
began=$SECONDS
python="$PWD/.venv-te/bin/python"
[ -x "$python" ] || .venv/bin/python -m venv --without-pip .venv-te
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
.venv/bin/python -c "$packages" >"$("$python" -c "$packages")/shared.pth"
bash ci/gpu/build_te.sh "$python"
eval "$(bash ci/gpu/build_te.sh --env "$python")"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- tests/te
"$python" -m pytest "$@"
echo "ci/te.sh: $((SECONDS - began)) s"
