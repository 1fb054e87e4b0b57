#!/usr/bin/env bash
# Random calls of plain torch (methods, masks, documents, wrappers, derivatives), command lines of
# trainings from what the parser declares, and questions to the planner: each is right, or refused by name.
# Usage: ci/fuzz.sh [--examples N] [pytest arguments]     (default 2000 of each kind; ci/nightly.sh: FUZZ)
#
#   ci/fuzz.sh --examples 300 -k trainings     one kind
#   ci/fuzz.sh --hypothesis-seed 7             the same examples again
#
# Models of transformers: PYTHONPATH=. .venv-huggingface/bin/python ci/faults/fuzz_huggingface.py --examples N
set -euo pipefail
cd "$(dirname "$0")/.."
examples=2000
if [ "${1:-}" = --examples ]; then
  examples="$2"
  shift 2
fi
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 CP_PLUGIN_FUZZ="$examples"
exec python -m pytest -s tests/engine/attention/test_fuzz_calls.py tests/megatron/flags/test_fuzz_inputs.py tests/megatron/flags/test_one_question.py \
  --hypothesis-show-statistics "$@"
