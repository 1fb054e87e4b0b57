#!/usr/bin/env bash
# Random configurations of attention, and public calls in random wrappers: each is refused with a reason or equals the
# oracle. Usage: ci/fuzz.sh [NUMBER]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 CP_PLUGIN_FUZZ="${1:-2000}"
exec python -m pytest tests/core/test_fuzz.py tests/core/test_fuzz_calls.py --hypothesis-show-statistics
