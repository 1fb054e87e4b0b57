#!/usr/bin/env bash
# Wheels of the check's dependencies, for a machine without a network.
# Usage: ci/gpu/wheels.sh [DIR]                       download into DIR (default out/gpu/wheels; about 20 MB)
#        ci/gpu/wheels.sh --install DIR SITE PYTHON   install into the folder SITE what PYTHON lacks
# For Python 3.12 on x86-64 Linux; VERSION=3.13 selects another. torch and triton must be installed already.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
packages=( # megatron-core, what its training imports, and fla, the kernels of linear attention
  megatron-core fla-core einops numpy packaging psutil pyyaml tensorboard absl-py protobuf rich markdown-it-py mdurl pygments
)

if [ "${1:-}" = --install ]; then
  wheels="$2" site="$3" python="$4" missing=()
  for wheel in "$wheels"/*.whl; do
    name="$(basename "$wheel")"
    if ! "$python" -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "${name%%-*}" 2>/dev/null; then
      missing+=("$wheel")
    fi
  done
  [ ${#missing[@]} -gt 0 ] || exit 0
  exec "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "${missing[@]}"
fi

platforms=()
for libc in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${libc}_x86_64"); done
exec "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version "${VERSION:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 \
  --constraint "$here/../constraints.txt" --dest "${1:-out/gpu/wheels}" "${packages[@]}"
