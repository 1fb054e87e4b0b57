#!/usr/bin/env bash
# Mutation tests: every small bug in the core must make a test fail. Usage: ci/mutants.sh [MUTANT...] [--help]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
exec .venv/bin/python ci/mutants/run.py "$@"
