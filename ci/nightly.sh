#!/usr/bin/env bash
# What is too long for every change, each step to its end, and a summary; exit status 1 if any step failed.
# Usage: ci/nightly.sh [STEP...]     (default: all of fuzz parity exact faults soak cluster ratios versions megatron_main)
#
# MEGATRON_LM_GIT   a git directory of Megatron-LM: its main is checked too
# FUZZ              random configurations (default 20000)
# HISTORY           the file of ratios to add to (default out/perf/history.jsonl)
# Ratios and the virtual cluster need a machine that nobody else uses; the cluster needs root.
set -uo pipefail
cd "$(dirname "$0")/.."
all=(fuzz parity exact faults soak cluster ratios versions megatron_main)
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
    faults | soak)
      local script=ci/faults/run.sh
      [ "$1" = faults ] || script=ci/faults/soak.sh
      if [ -e "$script" ]; then step "$1" bash "$script"; else note "$1" "LEFT OUT: there is no $script" 0; fi
      ;;
    cluster)
      if [ "$(id -u)" = 0 ]; then
        step cluster "$python" ci/cluster/run.py --scenario flat64
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
