#!/usr/bin/env bash
# Memory and time of trainings beside llm-analysis, a calculator by others. Usage: ci/calculators.sh [pytest arguments]
#
# It has an environment of its own, .venv-calculators: of its dependencies it needs fire here, and with the transformers
# that it asks for (4) nothing else could be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh calculators
if outdated ci/calculators.sh; then
  pip_install fire==0.5.0
  install --no-deps llm-analysis==0.2.2
fi
[ $# -gt 0 ] || set -- tests/planner/test_calculators.py
run_tests "$@"
