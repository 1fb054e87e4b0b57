#!/usr/bin/env bash
# Tests with the real Megatron-Bridge, without a GPU. Usage: ci/nemo.sh [pytest arguments]   (default: tests/nemo)
#
# They have an environment of their own, .venv-nemo, because Bridge asks for older packages than .venv has, and every
# Megatron imports some of them where they are installed; all else is shared with .venv. Of what Bridge's wheel lists,
# only what its GPT training imports is installed: the rest is CUDA code, or for other models. Transformer Engine goes
# in as well where it has been built (ci/te.sh builds it); one test needs it, and says so where it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
began=$SECONDS
python="$PWD/.venv-nemo/bin/python"
[ -x "$python" ] || .venv/bin/python -m venv .venv-nemo
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
.venv/bin/python -c "$packages" >"$("$python" -c "$packages")/shared.pth"
stamp=.venv-nemo/installed
if [ ! -e "$stamp" ] || [ ci/nemo.txt -nt "$stamp" ] || [ ci/constraints.txt -nt "$stamp" ]; then
  pip=("$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts)
  pinned() { sed -n "/^$1==/p" ci/constraints.txt; }
  "${pip[@]}" -r ci/nemo.txt "$(pinned nvidia-modelopt)"
  "${pip[@]}" --no-deps "$(pinned megatron-bridge)"
  touch "$stamp"
fi
if bash ci/gpu/build_te.sh --cached "$python"; then
  bash ci/gpu/build_te.sh "$python"
  eval "$(bash ci/gpu/build_te.sh --env "$python")"
fi
echo "ci/nemo.sh: environment ready after $((SECONDS - began)) s"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- tests/nemo
"$python" -m pytest "$@"
echo "ci/nemo.sh: $((SECONDS - began)) s"
