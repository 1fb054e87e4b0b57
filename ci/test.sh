#!/usr/bin/env bash
# Lint and all tests, in an environment of their own; without arguments also ci/versions.sh and ci/patches.sh.
# Usage: ci/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
ruff format --check .
ruff check .
lint-imports
if [ $# -gt 0 ]; then
  python -m pytest "$@"
else
  alone=(tests/test_cluster.py tests/test_launch.py) # they watch clocks and processes
  python -m pytest -n 3 --dist loadfile "${alone[@]/#/--ignore=}"
  python -m pytest "${alone[@]}"
  bash ci/versions.sh
  bash ci/patches.sh
fi
