#!/usr/bin/env bash
# Tests with the real nvidia-modelopt, without a GPU. Usage: ci/modelopt.sh [pytest arguments]
#
# They have an environment of their own, .venv-modelopt, because every Megatron imports it where it is installed, and
# those of 0.17 and 0.18 cannot train from their wheel alone then; all else is shared with .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
began=$SECONDS
python="$PWD/.venv-modelopt/bin/python"
[ -x "$python" ] || .venv/bin/python -m venv .venv-modelopt
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
.venv/bin/python -c "$packages" >"$("$python" -c "$packages")/shared.pth"
stamp=.venv-modelopt/installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ ci/constraints.txt -nt "$stamp" ]; then
  wanted='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["modelopt"], sep="\n")'
  "$python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -r <("$python" -c "$wanted")
  touch "$stamp"
fi
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- tests/megatron/test_modelopt.py
"$python" -m pytest "$@"
echo "ci/modelopt.sh: $((SECONDS - began)) s"
