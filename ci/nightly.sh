#!/usr/bin/env bash
# What is too long for every change, each step to its end, and a summary; exit status 1 if any step failed.
# Usage: ci/nightly.sh [STEP...]     (default: all of tests kernels clocks te nemo modelopt huggingface calculators
# release fuzz inputs mutants parity exact faults saves soak cluster ratios versions megatron_main)
#
# `product`, by name only, runs the tests in all cases of their parameters instead of covering designs.
# MEGATRON_LM_GIT   a git directory of Megatron-LM: its main is checked too
# FUZZ              random configurations (default 10000)
# INPUTS            generated command lines and files (default 20000)
# HISTORY           the file of ratios to add to (default out/perf/history.jsonl)
# Ratios and the virtual cluster need a machine that nobody else uses; the cluster needs root.
set -uo pipefail
cd "$(dirname "$0")/.."
all=(tests kernels clocks te nemo modelopt huggingface calculators release fuzz inputs mutants parity exact faults saves soak
  cluster ratios versions megatron_main)
alone=(tests/test_cluster.py tests/test_launch.py) # they watch clocks and processes
[ $# -gt 0 ] || set -- "${all[@]}"
for name; do
  if [[ " ${all[*]} product " != *" $name "* ]]; then
    echo "nightly.sh: unknown step $name; there are ${all[*]} product" >&2
    exit 2
  fi
done
bash ci/environment.sh dev || exit 1
python=.venv/bin/python out=out/nightly history="${HISTORY:-out/perf/history.jsonl}"
mkdir -p "$out"
names=() states=() seconds=()

note() { names+=("$1") states+=("$2") seconds+=("$3"); }

step() { # NAME COMMAND...
  local name="$1" start=$SECONDS status
  shift
  echo "== $name: $*"
  "$@" 2>&1 | tee "$out/$name.log"
  status="${PIPESTATUS[0]}"
  case "$status" in
    0) note "$name" PASS $((SECONDS - start)) ;;
    *) note "$name" "FAIL ($status)" $((SECONDS - start)) ;;
  esac
}

ratios() {
  "$python" ci/perf/ratios.py --history "$history" && "$python" ci/perf/history.py "$history" "$out/history.svg"
}

run_one() {
  case "$1" in
    fuzz) step fuzz bash ci/fuzz.sh "${FUZZ:-10000}" ;;
    parity) step parity bash ci/parity/run.sh --all --out "$out/parity" ;;
    exact) step exact "$python" ci/perf/exact.py ;;
    inputs) step inputs "$python" ci/faults/fuzz_inputs.py --examples "${INPUTS:-20000}" ;;
    mutants) step mutants bash ci/mutants.sh --baseline -n 2 ;;
    faults) step faults bash ci/faults/run.sh --all ;;
    saves) step saves bash ci/faults/run.sh --saves 200 ;;
    soak) step soak "$python" ci/faults/soak.py --steps 5000 ;;
    tests | product)
      local apart=(tests/kernels tests/te tests/nemo "${alone[@]}")
      [ "$1" = tests ] || export CP_PLUGIN_PRODUCT=1
      step "$1" "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=30 "${apart[@]/#/--ignore=}"
      ;;
    kernels) step kernels env TRITON_INTERPRET=1 "$python" -m pytest -n 3 --durations=10 tests/kernels ;;
    clocks) step clocks "$python" -m pytest "${alone[@]}" ;;
    te)
      if command -v nvcc >/dev/null || compgen -G '/usr/local/cuda*/bin/nvcc' >/dev/null; then
        step te bash ci/te.sh
      else
        note te "LEFT OUT: there is no nvcc here, so Transformer Engine cannot be built" 0
      fi
      ;;
    nemo | modelopt | huggingface | calculators) step "$1" bash "ci/$1.sh" ;;
    release) step release bash ci/release.sh ;;
    cluster)
      if [ "$(id -u)" = 0 ]; then
        step cluster "$python" ci/cluster/run.py --scenario flat64 --rounds 2
        step inference "$python" ci/cluster/inference.py
      else
        note cluster "LEFT OUT: it needs root" 0
      fi
      ;;
    ratios) step ratios ratios ;;
    versions) step versions bash ci/versions.sh ;;
    megatron_main)
      if [ -n "${MEGATRON_LM_GIT:-}" ]; then
        step megatron_main bash ci/patches.sh
      else
        note megatron_main "LEFT OUT: MEGATRON_LM_GIT names no git directory" 0
      fi
      ;;
  esac
}

export OMP_NUM_THREADS=1 CP_PLUGIN_NIGHTLY=1 PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
for name; do run_one "$name"; done
failed=0
printf '\n%-14s %8s  %s\n' step seconds result
for i in "${!names[@]}"; do
  printf '%-14s %8s  %s\n' "${names[$i]}" "${seconds[$i]}" "${states[$i]}"
  [[ "${states[$i]}" == FAIL* ]] && failed=1
done
echo "logs: $out"
exit "$failed"
