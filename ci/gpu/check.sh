#!/usr/bin/env bash
# Check the plugin on a GPU machine: correctness, memory, speed, in this order; no speed is reported if anything is wrong.
# Usage: ci/gpu/check.sh [--smoke] [--tune] [--wheels DIR] [--from STEP] [--seconds N] [--only "STEP ..."] [--out DIR]
#   --wheels   a folder made by ci/gpu/wheels.sh: packages of Megatron's training and fla, used if not installed
#   --seconds  start no step that might not end in time; the output names the --from with which another call continues
#   --from     continue with this step: the results of earlier steps in --out stay on the page
#   --only     these steps: environment our_kernels extremes nccl training hot_path providers inference
#              ring_trace waiting performance tune
#   --tune     also search better block sizes for our kernels (up to nine minutes more)
#   --smoke    the same on a CPU with tiny shapes and Gloo, to test the check itself
#   --out      for check.json (everything), page.md (made from it), check.log and traces; default out/gpu
# Needs only PYTHON (default python3, 3.12 or newer) with torch and triton: what is missing is named on the page. COMMIT
# identifies the tree without git. Exit status 1 if anything is wrong; a slow figure is not wrong.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}" out=out/gpu smoke=() tune="" only="" from="" wheels="" budget=""
while [ $# -gt 0 ]; do
  case "$1" in
    --smoke) smoke=(--smoke) ;;
    --tune) tune=tune ;;
    --wheels | --from | --seconds | --only | --out)
      [ $# -gt 1 ] || { echo "check.sh: $1 needs a value; see the head of $0" >&2; exit 2; }
      case "$1" in --wheels) wheels="$2" ;; --from) from="$2" ;; --seconds) budget="$2" ;; --only) only="$2" ;; --out) out="$2" ;; esac
      shift ;;
    *) echo "check.sh: unknown argument $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

declare -A seconds does
every=""
while read -r name limit what; do
  every+="${every:+ }$name" seconds[$name]="$limit" does[$name]="$what"
done < <("$python" "$here/report.py" steps)
[ -n "$every" ] || exit 2 # Python has printed why
steps=() begun="${from:+no}"
for name in ${only:-${every% tune} $tune}; do
  if [ -z "${seconds[$name]:-}" ]; then
    echo "check.sh: unknown step $name; there are $every" >&2
    exit 2
  fi
  [ "$name" = "$from" ] && begun=""
  [ -n "$begun" ] || steps+=("$name")
done
if [ ${#steps[@]} -eq 0 ]; then
  echo "check.sh: --from $from is none of the steps ${only:-${every% tune} $tune}" >&2
  exit 2
fi
if [ -n "$budget" ] && ! [[ "$budget" =~ ^[0-9]+$ ]]; then
  echo "check.sh: --seconds $budget: give a whole number of seconds" >&2
  exit 2
fi
if [ -n "$wheels" ] && ! compgen -G "$wheels/*.whl" >/dev/null; then
  echo "check.sh: --wheels $wheels: there are no wheels; ci/gpu/wheels.sh $wheels downloads them" >&2
  exit 2
fi

export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # ranks are forked before CUDA is touched
COMMIT="${COMMIT:-$(git -C "$root" rev-parse HEAD 2>/dev/null)}"
export COMMIT
if [ ${#smoke[@]} -gt 0 ]; then
  export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=""
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "check.sh: $python sees no CUDA device (torch.cuda.is_available()); --smoke runs on a CPU" >&2
  exit 2
fi

mkdir -p "$out"
if [ -z "$from" ]; then
  rm -f "$out/page.md" "$out/check.log" "$out"/*.trace.json.gz
  for name in $every check; do rm -f "$out/$name.json"; done
fi
site=""
trap '[ -z "$site" ] || rm -rf "$site"' EXIT
if [ -n "$wheels" ]; then
  site="$(mktemp -d)"
  "$here/wheels.sh" --install "$wheels" "$site" "$python" || exit 2
  export PYTHONPATH="$PYTHONPATH:$site"
fi

{
  asked=()
  for name in "${steps[@]}"; do
    # the smoke test has much longer, also to import torch: it shares processors with other tests
    limit=$((${#smoke[@]} > 0 ? 5 * (${seconds[$name]} + 20) : ${seconds[$name]}))
    if [ -n "$budget" ] && [ $((SECONDS + limit + 20)) -gt "$budget" ]; then
      echo "== no time is left for $name; go on with --from $name"
      break
    fi
    asked+=("$name")
    echo "== $name"
    rm -f "$out/$name.json"
    if [ "${does[$name]}" = measures ] && ! "$python" "$here/report.py" withhold "$out" "$name"; then
      continue
    fi
    timeout --kill-after=5 $((limit + 10)) \
      "$python" "$here/$name.py" "${smoke[@]}" --out "$out" --seconds "$limit" || echo "$name: exit status $?"
  done
  echo "== result"
  "$python" "$here/report.py" finish "$out" "${asked[*]}"
} 2>&1 | tee -a "$out/check.log"
exit "${PIPESTATUS[0]}"
