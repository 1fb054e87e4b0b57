#!/usr/bin/env bash
# What can be known from one GPU machine, in one call of less than nine minutes: correctness, memory, speed.
# Usage: ci/gpu/check.sh [--smoke] [--tune] [--only "STEP ..."] [--out DIR]
#   --smoke   the same on a CPU with tiny shapes, to see that all of it runs
#   --tune    also look for better block sizes of our kernels (up to nine minutes more)
#   --only    these steps: environment our_kernels providers ranks hot_path inference performance tune
#   --out     for check.json (everything), page.md (made from it) and check.log; default out/gpu
# Needs PYTHON (default python3, 3.12 or newer) with torch and triton, and nothing else: what is missing is named on the
# page. COMMIT: what this tree is, where there is no git. Exit status 1 if anything is wrong; a slow figure is not wrong.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}" out=out/gpu smoke=() tune="" only=""
while [ $# -gt 0 ]; do
  case "$1" in
    --smoke) smoke=(--smoke) ;;
    --tune) tune=tune ;;
    --only) only="$2"; shift ;;
    --out) out="$2"; shift ;;
    *) echo "check.sh: unknown argument $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done
steps="${only:-environment our_kernels providers ranks hot_path inference performance $tune}"

export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # ranks are forked before CUDA is touched
if [ ${#smoke[@]} -gt 0 ]; then
  export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=""
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "check.sh: $python sees no CUDA device (torch.cuda.is_available()); --smoke runs on a CPU" >&2
  exit 2
fi

# Seconds of every step, after which it begins nothing more; it is stopped 10 seconds later. Without tune: 515 at most.
# The smoke test has five times as long: it shares its processors with other tests.
declare -A seconds=([environment]=15 [our_kernels]=95 [providers]=105 [ranks]=45 [hot_path]=35 [inference]=40
  [performance]=110 [tune]=480)
for name in $steps; do
  if [ -z "${seconds[$name]:-}" ]; then
    echo "check.sh: unknown step $name; there are ${!seconds[*]}" >&2
    exit 2
  fi
done

mkdir -p "$out"
rm -f "$out"/{environment,our_kernels,providers,ranks,hot_path,inference,performance,tune,check}.json "$out/page.md" "$out/check.log"
{
  for name in $steps; do
    echo "== $name"
    limit=$((${seconds[$name]} * (${#smoke[@]} > 0 ? 5 : 1)))
    timeout --kill-after=5 $((limit + 10)) \
      "$python" "$here/$name.py" "${smoke[@]}" --out "$out" --seconds "$limit" || echo "$name: exit status $?"
  done
  echo "== result"
  "$python" "$here/report.py" finish "$out" "$steps"
} 2>&1 | tee "$out/check.log"
exit "${PIPESTATUS[0]}"
