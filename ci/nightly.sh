#!/usr/bin/env bash
# What is too long for every change, each step to its end, and a summary; exit status 1 if any step failed.
# Usage: ci/nightly.sh [STEP...]     (default: all of fuzz inputs parity exact faults saves soak
# kernels fake_cuda ranks64 strict texts cluster ratios versions megatron_main)
#
# MEGATRON_LM_GIT   a git directory of Megatron-LM: its main is checked too
# FUZZ              random configurations (default 20000)
# INPUTS            generated command lines and files (default 100000)
# HISTORY           the file of ratios to add to (default out/perf/history.jsonl)
# Ratios and the virtual cluster need a machine that nobody else uses; the cluster needs root.
set -uo pipefail
cd "$(dirname "$0")/.."
all=(fuzz inputs parity exact faults saves soak kernels fake_cuda ranks64 strict texts cluster ratios versions megatron_main)
[ $# -gt 0 ] || set -- "${all[@]}"
for name; do
  if [[ " ${all[*]} " != *" $name "* ]]; then
    echo "nightly.sh: unknown step $name; there are ${all[*]}" >&2
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
    fuzz) step fuzz bash ci/fuzz.sh "${FUZZ:-20000}" ;;
    parity) step parity bash ci/parity/run.sh --all --out "$out/parity" ;;
    exact) step exact "$python" ci/perf/exact.py ;;
    inputs) step inputs "$python" ci/faults/fuzz_inputs.py --examples "${INPUTS:-100000}" ;;
    faults) step faults bash ci/faults/run.sh --all ;;
    saves) step saves bash ci/faults/run.sh --saves 200 ;;
    soak) step soak "$python" ci/faults/soak.py --steps 5000 ;;
    kernels) step kernels env CP_PLUGIN_NIGHTLY=1 TRITON_INTERPRET=1 "$python" -m pytest tests/kernels ;;
    fake_cuda) step fake_cuda env CP_PLUGIN_NIGHTLY=1 "$python" -m pytest tests/fake_cuda/test_cuda_branches.py ;;
    ranks64)
      step ranks64 env CP_PLUGIN_NIGHTLY=1 "$python" -m pytest tests/core/test_methods.py \
        tests/megatron/test_examples_megatron.py -k "64_ranks or dry_run"
      ;;
    strict) step strict env CP_PLUGIN_NIGHTLY=1 "$python" -m pytest tests/strict ;;
    texts) step texts env CP_PLUGIN_NIGHTLY=1 "$python" -m pytest tests/megatron/test_texts.py ;;
    cluster)
      if [ "$(id -u)" = 0 ]; then
        step cluster "$python" ci/cluster/run.py --scenario flat64
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

export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
for name; do run_one "$name"; done
failed=0
printf '\n%-14s %8s  %s\n' step seconds result
for i in "${!names[@]}"; do
  printf '%-14s %8s  %s\n' "${names[$i]}" "${seconds[$i]}" "${states[$i]}"
  [[ "${states[$i]}" == FAIL* ]] && failed=1
done
echo "logs: $out"
exit "$failed"
