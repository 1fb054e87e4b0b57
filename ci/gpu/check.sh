#!/usr/bin/env bash
# Everything there is to know from one CUDA machine, in one call: what is installed, correctness, then figures.
# Usage: ci/gpu/check.sh [OUT]      (OUT: where reports go; default docs/gpu. PYTHON: the interpreter, default python3)
# Needs torch with CUDA, and the packages of pyproject.toml except megatron-core. Exit status 1 if anything is wrong.
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${1:-docs/gpu}"
python="${PYTHON:-python3}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=140
failed=()

step() { # name, command...
  local name="$1"
  shift
  echo "== $name"
  if ! "$@" 2>&1 | tee "$out/$name.txt"; then
    failed+=("$name")
  fi
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
  "$python" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)'
} 2>&1 | tee "$out/machine.txt"
step doctor "$python" -m cp_plugin.cli doctor
step kernels "$python" -m pytest -q -rs tests/core/test_backends.py
for dtype in bfloat16 float16; do
  step "verify-$dtype" "$python" -m cp_plugin.cli verify --device cuda --size 4 --dtype "$dtype" --seq-length 2048 --heads 16 --kv-heads 4 --head-dim 128
done
step figures "$python" ci/gpu/figures.py --json "$out/figures.json"

if [ "${#failed[@]}" -gt 0 ]; then
  echo "FAIL: ${failed[*]}"
  exit 1
fi
echo "PASS: reports are in $out"
