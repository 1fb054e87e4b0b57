#!/usr/bin/env bash
# Plant faults in trainings and look how they end. Usage: ci/faults/run.sh [--short | --all | --only NAME]
set -euo pipefail
cd "$(dirname "$0")/../.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
exec python ci/faults/run.py "$@"
