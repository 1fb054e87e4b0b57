#!/usr/bin/env bash
# Small bugs in the core, one at a time: every one must make a test fail. Usage: ci/mutants.sh [MUTANT...] [--help]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
exec .venv/bin/python ci/mutants/run.py "$@"
