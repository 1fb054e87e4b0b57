#!/usr/bin/env bash
# Mutation tests: every small bug in the core must make a test fail. Usage: ci/mutants.sh [MUTANT...] [--help]
# Uses its own environment, .venv-mutants, and for tests/huggingface that of ci/huggingface.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/huggingface.sh --version
. ci/beside.sh mutants
if outdated ci/constraints.txt; then install -c ci/constraints.txt cosmic-ray; fi
exec "$python" ci/mutants/run.py "$@"
