#!/usr/bin/env bash
# Lint and tests, in their own environment. Usage: ci/test.sh [--changed [BASE] | --all | pytest arguments]
#
#   ci/test.sh                    what every change needs: 10 minutes on two cores once .venv exists; includes the
#                                 example with transformers' Trainer, in an environment of its own (ci/huggingface.sh)
#   ci/test.sh --changed [BASE]   only the tests that import or name something that differs from BASE (ci/changed.py)
#   ci/test.sh --all              also short versions of those that need their own environment or a quiet clock: planted
#                                 faults in training, other megatron-core versions, the native hook, Megatron-Bridge,
#                                 nvidia-modelopt, transformers, parity, the release
#   ci/test.sh tests/engine -k ring pass arguments to pytest
#
# Everything left out is printed with the reason; ci/nightly.sh runs the rest. Environments run two at a time, since each
# spends half its time on pip or imports; the output of each is printed when it is done.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit ;; esac
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # otherwise three processes compile all tests again in every run
ruff format --check .
ruff check .
lint-imports

alone=(tests/ci/test_cluster.py tests/testing/test_launch.py) # they watch clocks and processes
elsewhere=(tests/te tests/nemo)                    # they need their own environments

trainer() { bash ci/huggingface.sh tests/huggingface/test_trainer.py -k example; }

in_parts() { # TEST FILE...: each in the process that it needs
  local file kernels=() clocks=() others=()
  for file; do
    case "$file" in
      tests/te/* | tests/nemo/*) echo "LEFT OUT: $file: it needs its own environment (ci/te.sh, ci/nemo.sh)" ;;
      tests/kernels/*) kernels+=("$file") ;;
      tests/huggingface/test_trainer.py) trainer ;;
      tests/ci/test_cluster.py | tests/testing/test_launch.py) clocks+=("$file") ;;
      *) others+=("$file") ;;
    esac
  done
  [ ${#others[@]} = 0 ] || python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "${others[@]}"
  [ ${#kernels[@]} = 0 ] || TRITON_INTERPRET=1 python -m pytest -n 3 "${kernels[@]}"
  [ ${#clocks[@]} = 0 ] || python -m pytest "${clocks[@]}"
}

part() { # COMMAND: run it, then print its output; return its status
  local began=$SECONDS status=0 log
  log="$(mktemp)"
  bash -euo pipefail -c "$1" >"$log" 2>&1 || status=$?
  echo "ci/test.sh: $1: $((SECONDS - began)) s, status $status" >>"$log"
  flock ci/test.sh cat "$log"
  rm "$log"
  return "$((status > 0))"
}
export -f part

case "${1:-}" in
  --changed)
    mapfile -t files < <(python ci/changed.py "${@:2:1}")
    echo "ci/test.sh: ${#files[@]} test files are touched"
    in_parts "${files[@]}"
    exit
    ;;
  --all) ;;
  ?*)
    python -m pytest "$@"
    exit
    ;;
esac
apart=(tests/kernels "${elsewhere[@]}" "${alone[@]}")
logs="$(mktemp -d)" beside=() # processes beside the others, which wait at times
trap 'kill $(jobs -p) 2>/dev/null || true; rm -r "$logs"' EXIT
TRITON_INTERPRET=1 python -m pytest --durations=5 tests/kernels >"$logs/kernels" 2>&1 & beside+=($!)
if [ "${1:-}" != --all ]; then trainer >"$logs/trainer" 2>&1 & beside+=($!); fi # --all runs all of tests/huggingface
failed=0
# Whole files, in the order of tests/conftest.py: the longest first, so that no process is left with one at the end.
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20 "${apart[@]/#/--ignore=}" || failed=1
for process in "${beside[@]}"; do wait "$process" || failed=1; done
cat "$logs"/*
python -m pytest --durations=5 "${alone[@]}" || failed=1
echo "ci/test.sh: $SECONDS s"
[ "$failed" = 0 ] || exit 1
if [ "${1:-}" = --all ]; then
  bash ci/faults/run.sh --short # it watches clocks, too
  echo "LEFT OUT: tests/te: ci/nightly.sh te, or bash ci/te.sh, which builds Transformer Engine in 9 to 20 minutes"
  parts=( # the longest first
    "bash ci/huggingface.sh"
    "bash ci/nemo.sh"
    "bash ci/versions.sh; bash ci/patches.sh" # they share the unpacked wheels
    "bash ci/parity/run.sh --short"
    ".venv/bin/python ci/faults/soak.py --steps 150; bash ci/fuzz.sh --examples 100 -k flags"
    "bash ci/release.sh"
    "bash ci/modelopt.sh"
  )
  printf '%s\0' "${parts[@]}" | xargs -0 -n 1 -P 2 bash -c 'part "$1"' part
  echo "ci/test.sh --all: $SECONDS s"
fi
