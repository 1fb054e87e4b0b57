#!/usr/bin/env bash
# Everything to take along to a GPU machine without a network, in one folder of less than 40 MB.
# Usage: ci/gpu/pack.sh [--minutes N] [DIR [TRITON]]     (default: 20 out/gpu/pack 3.6.0)
#
# DIR/wheels (ci/gpu/wheels.sh), DIR/kernels.tar.xz (Triton's cache with the kernels that the check launches, compiled for
# sm_90 without a GPU), DIR/pack.json (versions), DIR/START (the command for that machine). The cache is used if TRITON is
# that machine's version, from the same wheel: ci/gpu/check.sh --pack DIR says so, and how many kernels it compiled itself.
#
# It ends after N minutes, with the kernels that the first steps of the check need; another call goes on with those of
# DIR.cache. .venv-pack has .venv's packages and that Triton.
set -euo pipefail
cd "$(dirname "$0")/../.."
minutes=20
if [ "${1:-}" = --minutes ]; then
  minutes="$2"
  shift 2
fi
dir="${1:-out/gpu/pack}" triton="${2:-3.6.0}"
. ci/beside.sh pack
pip_install --no-deps "triton==$triton"
rm -rf "$dir"
PYTHON="$python" bash ci/gpu/wheels.sh "$dir/wheels"
"$python" ci/gpu/pack.py "$dir" $((60 * minutes - SECONDS - 120)) # archiving takes a minute
size="$(du -sm "$dir" | cut -f1)"
echo "$dir: $size MB in $SECONDS s; on the GPU machine, in the root of the repository: $(cat "$dir/START")"
[ "$size" -lt 40 ] || { echo "pack.sh: 40 MB is the limit" >&2; exit 1; }
