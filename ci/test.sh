#!/usr/bin/env bash
# Lint and all tests, in an environment of their own. Usage: ci/test.sh [pytest arguments]
#
# Without arguments also what needs a process or an environment of its own: Triton's kernels in its interpreter, other
# versions of megatron-core, the native hook, nvidia-modelopt, transformers, the release, and Transformer Engine where it
# can be built.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
ruff format --check .
ruff check .
lint-imports
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
if [ $# -gt 0 ]; then
  python -m pytest "$@"
else
  alone=(tests/test_cluster.py tests/test_launch.py) # they watch clocks and processes
  apart=(tests/kernels tests/te tests/nemo "${alone[@]}")
  python -m pytest -n 3 --dist loadfile --durations=20 "${apart[@]/#/--ignore=}"
  python -m pytest "${alone[@]}"
  TRITON_INTERPRET=1 python -m pytest -n 3 tests/kernels
  bash ci/versions.sh
  bash ci/patches.sh
  bash ci/parity/run.sh --short
  bash ci/modelopt.sh
  bash ci/huggingface.sh
  bash ci/release.sh
  bash ci/nemo.sh
  if command -v nvcc >/dev/null || compgen -G '/usr/local/cuda*/bin/nvcc' >/dev/null; then
    bash ci/te.sh
  else
    echo "LEFT OUT: tests/te: there is no nvcc here, so Transformer Engine cannot be built"
  fi
fi
