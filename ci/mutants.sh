#!/usr/bin/env bash
# Mutation tests: every small bug in the core must make a test fail. Usage: ci/mutants.sh [MUTANT...] [--help]
#
# --sample uses its own environment, .venv-mutants; mutants that tests/huggingface should notice need ci/huggingface.sh's.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
python=.venv/bin/python
case " $* " in
  *" --sample "*)
    . ci/beside.sh mutants
    if outdated ci/constraints.txt; then install -c ci/constraints.txt cosmic-ray; fi
    ;;
  *" --list "* | *" --faults "* | *" --help "*) ;;
  *) bash ci/huggingface.sh --version ;;
esac
exec "$python" ci/mutants/run.py "$@"
