#!/usr/bin/env bash
# What is too long for every change, each step to its end, and a summary; exit status 1 if any step failed.
# Usage: ci/nightly.sh [STEP...]     (default: all of cluster ratios faults te tests kernels parity mutants sample
# fuzz models soak exact torch megatron_main)
#
# Other environments and versions, and the release, are left to ci/test.sh --all. `product`, by name only, runs the tests
# in all cases of their parameters instead of covering designs.
# MEGATRON_LM_GIT   a git directory of Megatron-LM: its main is checked too
# FUZZ              random calls, command lines and questions of each kind (default 2000)
# SAMPLE            random changes of the code, of which the log names those that no test sees (default 60)
# MODELS            tiny models of transformers (default 2000), others every night
# Ratios and the virtual cluster need a machine that nobody else uses; the cluster needs root.
set -uo pipefail
cd "$(dirname "$0")/.."
in_turn=(cluster ratios faults te tests) # they watch clocks, or use every processor
in_pairs=(kernels parity mutants sample fuzz models soak exact torch megatron_main)
[ $# -gt 0 ] || set -- "${in_turn[@]}" "${in_pairs[@]}"
turns=() pairs=()
for name; do
  case " ${in_turn[*]} product / ${in_pairs[*]} " in
    *" $name "*/*) turns+=("$name") ;;
    */*" $name "*) pairs+=("$name") ;;
    *)
      echo "nightly.sh: unknown step $name; there are ${in_turn[*]} ${in_pairs[*]} product" >&2
      exit 2
      ;;
  esac
done
bash ci/environment.sh dev || exit 1
export python=.venv/bin/python out=out/nightly
export OMP_NUM_THREADS=1 CP_PLUGIN_NIGHTLY=1 PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
rm -f "$out/results"

note() { printf '%-14s %8s  %s\n' "$@" >>"$out/results"; }

step() { # NAME COMMAND...
  local name="$1" start=$SECONDS status
  shift
  echo "== $name: $*"
  "$@" 2>&1 | tee "$out/$name.log" | sed -u "s/^/$name| /"
  status="${PIPESTATUS[0]}"
  if [ "$status" = 0 ]; then status=PASS; else status="FAIL ($status)"; fi
  note "$name" $((SECONDS - start)) "$status"
}

models() {
  bash ci/huggingface.sh tests/huggingface tests/ci/test_gpu_check.py::test_training_over_process_groups &&
    .venv-huggingface/bin/python ci/faults/fuzz_huggingface.py --examples "${MODELS:-2000}" --seed "$(date +%Y%m%d)"
}

run() { # STEP
  local apart=(tests/kernels tests/te tests/nemo tests/ci/test_cluster.py tests/testing/test_launch.py)
  case "$1" in
    cluster)
      if [ "$(id -u)" = 0 ]; then
        step cluster "$python" ci/cluster/run.py --scenario flat64 --rounds 2
      else
        note cluster 0 "LEFT OUT: it needs root"
      fi
      ;;
    ratios) step ratios "$python" ci/perf/ratios.py ;;
    faults) step faults bash ci/faults/run.sh --all ;;
    te)
      if command -v nvcc >/dev/null || compgen -G '/usr/local/cuda*/bin/nvcc' >/dev/null; then
        step te bash ci/te.sh
      else
        note te 0 "LEFT OUT: there is no nvcc here, so Transformer Engine cannot be built"
      fi
      ;;
    tests | product)
      [ "$1" = tests ] || export CP_PLUGIN_PRODUCT=1
      # A process that has run out of work takes some of another's: files of one process would last longest alone.
      step "$1" "$python" -m pytest -n 3 --dist worksteal --durations=60 "${apart[@]/#/--ignore=}"
      ;;
    kernels) step kernels env TRITON_INTERPRET=1 "$python" -m pytest -n 2 --durations=10 tests/kernels ;;
    parity) step parity bash ci/parity/run.sh --all --out "$out/parity" ;;
    mutants) step mutants bash ci/mutants.sh -n 2 ;; # ci/test.sh --all shows that they pass without a bug
    sample) step sample bash ci/mutants.sh --sample "${SAMPLE:-60}" -n 2 ;;
    fuzz) step fuzz bash ci/fuzz.sh --examples "${FUZZ:-2000}" ;;
    models) step models models ;;
    soak) step soak "$python" ci/faults/soak.py --steps 2500 ;;
    exact) step exact "$python" ci/perf/exact.py ;;
    torch) step torch env -u CP_PLUGIN_NIGHTLY bash ci/versions.sh torch ;;
    megatron_main)
      if [ -n "${MEGATRON_LM_GIT:-}" ]; then
        step megatron_main bash ci/patches.sh
      else
        note megatron_main 0 "LEFT OUT: MEGATRON_LM_GIT names no git directory"
      fi
      ;;
  esac
}
export -f note step models run

for name in "${turns[@]}"; do run "$name"; done
printf '%s\0' "${pairs[@]}" | xargs -0 -r -n 1 -P 2 bash -uo pipefail -c 'run "$1"' run
printf '\n%-14s %8s  %s\n' step seconds result
cat "$out/results"
echo "logs: $out"
! grep -q 'FAIL' "$out/results"
