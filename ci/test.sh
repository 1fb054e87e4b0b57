#!/usr/bin/env bash
# Lint and all tests, in an environment of their own. Usage: ci/test.sh [pytest arguments]
#
# Without arguments also what needs a process or an environment of its own: Triton's kernels in its interpreter, other
# versions of megatron-core, the native hook, nvidia-modelopt, transformers, the release, and Transformer Engine where it
# can be built. These environments run two at a time, since each waits for pip or imports for half of it; what one says
# is printed when it is done.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
ruff format --check .
ruff check .
lint-imports
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

part() { # COMMAND: run it, then print what it said; its status
  local began=$SECONDS status=0 log
  log="$(mktemp)"
  bash -euo pipefail -c "$1" >"$log" 2>&1 || status=$?
  echo "ci/test.sh: $1: $((SECONDS - began)) s, status $status" >>"$log"
  flock ci/test.sh cat "$log"
  rm "$log"
  return "$((status > 0))"
}
export -f part

if [ $# -gt 0 ]; then
  python -m pytest "$@"
else
  alone=(tests/test_cluster.py tests/test_launch.py) # they watch clocks and processes
  apart=(tests/kernels tests/te tests/nemo "${alone[@]}")
  # Whole files, in the order of tests/conftest.py: the longest first, so that no process is left with one at the end.
  python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20 "${apart[@]/#/--ignore=}"
  python -m pytest "${alone[@]}"
  bash ci/faults/run.sh --short # it watches clocks, too
  TRITON_INTERPRET=1 python -m pytest -n 3 tests/kernels
  te="bash ci/te.sh"
  if ! command -v nvcc >/dev/null && ! compgen -G '/usr/local/cuda*/bin/nvcc' >/dev/null; then
    te="echo 'LEFT OUT: tests/te: there is no nvcc here, so Transformer Engine cannot be built'"
  fi
  parts=(
    "bash ci/nemo.sh; $te" # they share what was built of Transformer Engine
    "bash ci/versions.sh; bash ci/patches.sh" # and these the unpacked wheels
    "bash ci/parity/run.sh --short"
    ".venv/bin/python ci/faults/soak.py --steps 150; .venv/bin/python ci/faults/fuzz_inputs.py --examples 400"
    "bash ci/release.sh"
    "bash ci/modelopt.sh"
    "bash ci/huggingface.sh"
  )
  printf '%s\0' "${parts[@]}" | xargs -0 -n 1 -P 2 bash -c 'part "$1"' part
fi
