#!/usr/bin/env bash
# Memory and time of trainings against llm-analysis, a third-party calculator. Usage: ci/calculators.sh [pytest arguments]
#
# Uses its own environment, .venv-calculators, with only fire of its dependencies: it requires transformers 4, which would
# conflict with everything else.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh calculators
if outdated ci/calculators.sh; then
  pip_install fire==0.5.0
  install --no-deps llm-analysis==0.2.2
fi
[ $# -gt 0 ] || set -- tests/planner/test_calculators.py
run_tests "$@"
