#!/usr/bin/env bash
# Build Transformer Engine for the torch of a Python and install it there. Needs nvcc of torch's CUDA major, no GPU.
# Usage: ci/gpu/build_te.sh [PYTHON]                (default: python3)
#        ci/gpu/build_te.sh --fetch DIR [PYTHON]    only download the sources and tools of a build
#        ci/gpu/build_te.sh --cached [PYTHON]       exit status 0 if it is built already, else 1
#        ci/gpu/build_te.sh --env [PYTHON]          print the environment needed to import it: eval "$(...)"
#
# The version is that of ci/constraints.txt. Builds are cached, and later calls only install them.
#
# TE_WHEELS         a folder made by --fetch on another machine with the same Python: nothing is downloaded
# CP_PLUGIN_CACHE   where builds are kept (default: cp_plugin in XDG_CACHE_HOME or ~/.cache)
# CUDA_HOME         the CUDA toolkit (default: the first that fits among /usr/local/cuda* and the one of nvcc)
# MAX_JOBS          compilers at a time (default: one for each core, as far as memory goes)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
needs=(einops onnx onnxscript packaging pydantic) # its others are torch, and for debugging and grouped MLPs only
tools=(ninja pybind11 setuptools wheel)
began=$SECONDS

fail() {
  echo "build_te.sh: $*" >&2
  exit 1
}

mode=build
case "${1:-}" in
  --fetch)
    mode=fetch
    files="$(mkdir -p "${2:?--fetch needs a folder}" && cd "$2" && pwd)"
    shift 2
    ;;
  --env | --cached)
    mode="${1#--}"
    shift
    ;;
  -*) fail "unknown option $1; see the head of this file" ;;
esac
python="${1:-python3}"

"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip"
facts="$("$python" - <<'PY'
import importlib.util, platform, sys
from pathlib import Path
import torch
spec = importlib.util.find_spec("nvidia")
roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
find = lambda kind: ":".join(str(path) for root in roots for path in sorted(root.glob(f"*/{kind}")) if path.is_dir())
print(torch.__version__, torch.version.cuda or "none", f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}")
print(find("include"))
print(find("lib"))
print(roots[0] if roots else "")
PY
)" || fail "$python cannot import torch"
{
  read -r torch cuda tag
  read -r includes || true
  read -r libraries || true
  read -r packages || true
} <<<"$facts"

environment() { # where TE finds the libraries that torch brought; it looks in the toolkit and beside itself only
  [ -n "$packages" ] || return 0
  echo "export LD_LIBRARY_PATH='$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}'"
  printf "export %s_HOME='$packages'\n" CUBLAS CUDART CUDNN CURAND NVRTC
}

if [ "$mode" = env ]; then
  environment
  exit
fi
[ "$cuda" != none ] || fail "torch $torch of $python is built without CUDA: install a torch with CUDA"
major="${cuda%%.*}"
te="$(sed -n 's/^transformer-engine==//p' "$here/../constraints.txt")"
cache="${CP_PLUGIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cp_plugin}/te/$te"
built="$cache/torch-$torch-cuda$major-$tag"
if [ "$mode" = cached ]; then
  [ -d "$built" ]
  exit
fi
work="$(mktemp -d)"
trap 'rm -rf "$work" "$cache"/*.$$' EXIT

room() { # folder, MB
  local free
  free="$(df --output=avail -BM "$1" | tail -n 1 | tr -dc '0-9')"
  [ "$free" -ge "$2" ] || fail "$free MB free in $1, $2 are needed"
}

pip() {
  "$python" -m pip --disable-pip-version-check --quiet "$@"
}

get_tools() { # pip's options for where packages come from
  pip install --no-warn-conflicts --target "$work/tools" "$@" "${tools[@]}" || return
  export PYTHONPATH="$work/tools${PYTHONPATH:+:$PYTHONPATH}" PATH="$work/tools/bin:$PATH"
}

fetch() { # folder
  echo "fetching Transformer Engine $te for CUDA $major (300 MB) into $1"
  mkdir -p "$1"
  room "$1" 1000
  pip download -d "$1" "${tools[@]}" "${needs[@]}"
  get_tools --no-index --find-links "$1"
  pip download -d "$1" --no-deps "transformer-engine==$te" "transformer-engine-cu$major==$te"
  pip download -d "$1" --no-deps --no-build-isolation --no-binary :all: "transformer-engine-torch==$te"
}

toolkit() { # the first CUDA toolkit of torch's major
  local home release found="" candidates=("${CUDA_HOME:-/usr/local/cuda}")
  if [ -z "${CUDA_HOME:-}" ]; then
    candidates+=("/usr/local/cuda-$major"*)
    ! command -v nvcc >/dev/null || candidates+=("$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")")
  fi
  for home in "${candidates[@]}"; do
    [ -x "$home/bin/nvcc" ] || continue
    release="$("$home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
    if [ "${release%%.*}" = "$major" ]; then
      echo "$home"
      return
    fi
    found="$found, $home has CUDA $release"
  done
  fail "torch $torch needs nvcc of CUDA $major${found:-, and there is none in ${candidates[*]}}: install that toolkit, or set CUDA_HOME"
}

build() { # folder with the files
  local home jobs memory
  home="$(toolkit)"
  command -v c++ >/dev/null || fail "a C++ compiler is needed (g++)"
  room "$work" 2000
  memory="$(awk '/MemAvailable/ { print int($2 / 1048576 / 2) }' /proc/meminfo)"
  jobs="$(nproc)"
  [ "$memory" -ge "$jobs" ] || jobs=$((memory > 0 ? memory : 1))
  echo "building Transformer Engine $te for torch $torch with $home, ${MAX_JOBS:-$jobs} compilers at a time"
  local lacks="$1 lacks what a build needs; --fetch fills such a folder"
  [ -d "$work/tools" ] || get_tools --no-index --find-links "$1" || fail "$lacks"
  pip install --target "$work/core" --no-deps --no-warn-conflicts --no-index --find-links "$1" "transformer-engine==$te" \
    "transformer-engine-cu$major==$te" || fail "$lacks"
  local log="$work/build.log"
  if ! PYTHONPATH="$work/core:$PYTHONPATH" NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE CUDA_HOME="$home" \
    MAX_JOBS="${MAX_JOBS:-$jobs}" CPATH="$includes${CPATH:+:$CPATH}" LIBRARY_PATH="$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}" \
    "$python" -m pip wheel -v --no-deps --no-index --no-build-isolation --find-links "$1" -w "$work/wheels" \
    "transformer-engine-torch==$te" 2>&1 | tee "$log" |
    awk '/^ *\[[0-9]+\/[0-9]+\] / { printf "  %s compiled\n", $1; fflush() }'; then
    grep -m 20 -E "error|Error|ERROR" "$log" >&2 || tail -n 30 "$log" >&2
    fail "the build failed; the compiler's messages are above"
  fi
  cp "$1"/transformer_engine-"$te"*.whl "$1"/transformer_engine_cu"$major"-"$te"*.whl "$work/wheels/"
  mkdir -p "$cache"
  room "$cache" 1000
  cp -r "$work/wheels" "$built.$$"
  mv -T "$built.$$" "$built" 2>/dev/null || rm -rf "$built.$$" # another call was faster
}

installed() {
  "$python" - "$built" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, distribution
try:
    sys.exit(sys.argv[1] not in (distribution("transformer_engine_torch").read_text("direct_url.json") or "").replace("%2B", "+"))
except PackageNotFoundError:
    sys.exit(1)
PY
}

if [ "$mode" = fetch ]; then
  fetch "$files"
  exit
fi
files="${TE_WHEELS:-$cache/files-cuda$major-$tag}"
[ -z "${TE_WHEELS:-}" ] || [ -d "$TE_WHEELS" ] || fail "TE_WHEELS=$TE_WHEELS is no folder"
if [ ! -d "$built" ]; then
  toolkit >/dev/null
  if [ ! -d "$files" ]; then
    fetch "$files.$$"
    mv -T "$files.$$" "$files" 2>/dev/null || rm -rf "$files.$$"
  fi
  build "$files"
fi
if installed; then
  echo "Transformer Engine $te for torch $torch is installed"
else
  room "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" 2000
  from=()
  [ ! -d "$files" ] || from=(--no-index --find-links "$files")
  pip install --no-warn-conflicts "${from[@]}" "${needs[@]}"
  pip install --no-warn-conflicts --no-deps --no-index --force-reinstall "$built"/*.whl
fi
eval "$(environment)"
"$python" -c '
import torch, transformer_engine.pytorch
from importlib.metadata import version
print("Transformer Engine", version("transformer-engine"), "imports with torch", torch.__version__)
' || fail "it is installed and does not import"
echo "done in $((SECONDS - began)) s; before it is used: eval \"\$(ci/gpu/build_te.sh --env $python)\""
