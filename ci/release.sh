#!/usr/bin/env bash
# Build sdist and wheel from a clean copy, install the wheel into its own environment, use it outside of the repository, and
# type-check the public modules. Usage: ci/release.sh [--full]
#
# The environment, .venv-release, sees the packages of .venv except the project; with --full it is empty and new, and pip
# installs all dependencies (5 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh release
root="$PWD" work="$(mktemp -d)" tools="$python"
trap 'rm -rf "$work"' EXIT
if outdated ci/constraints.txt; then
  install -c ci/constraints.txt build mypy
fi

echo "building from a clean copy"
mkdir "$work/copy" "$work/here"
git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T- -c | tar x -C "$work/copy"
"$tools" -m build --outdir "$work/dist" "$work/copy" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
ls -l "$work/dist" | tail -n +2

if [ "${1:-}" = --full ]; then
  echo "installing into an empty environment"
  .venv/bin/python -m venv "$work/venv"
  python="$work/venv/bin/python"
  "$python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt "$work"/dist/*.whl
else
  python="$tools"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed "$work"/dist/*.whl
fi
echo "installed after $((SECONDS - began)) s"

echo "using it"
cd "$work/here"
export OMP_NUM_THREADS=1
unset PYTHONPATH
run() { # NAME COMMAND...: a command that must succeed; its last line
  local name="$1"
  shift
  "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "FAIL: $*"; exit 1; }
  echo "  $name: $(grep -v '^ *$' "$work/log" | tail -1 | cut -c1-90)"
}
command="$(dirname "$python")/cp-plugin"
run import "$python" -c "import cp_plugin, sys; assert cp_plugin.__file__.startswith(sys.prefix); print(cp_plugin.__version__)"
run doctor "$command" doctor
run traffic "$command" traffic
run verify "$command" verify --ranks 2 --provider ring --dtype float32
run plan "$command" plan --model llama3-8b --cluster dgx-h100 --devices 8 --seq-length 32768
run pretrain_gpt "$python" -m cp_plugin.pretrain_gpt --nproc 2 --help
run torch_attention "$python" "$root/examples/torch_attention.py"
run examples "$python" -c "
from cp_plugin.tools.examples.config import FOLDER
found = list(FOLDER.glob('*/config.yaml'))
assert len(found) == 9 and not FOLDER.is_symlink(), found
print(len(found))"

echo "types"
types="$tools -m mypy --cache-dir $root/.venv-release/mypy --follow-imports=silent"
cp "$root/tests/equipment/libraries/typed_user.py" .
run "a user's file, strictly" $types --strict --python-executable "$python" typed_user.py
cd "$root"
public=(cp_plugin/__init__.py cp_plugin/huggingface cp_plugin/engine/attention/{api,linear,convolution,shift}.py cp_plugin/engine/core/{layout,mask,problem,tree}.py)
public+=(cp_plugin/engine/methods/{protocol,registry}.py cp_plugin/engine/comm)
run "public modules" $types --python-executable .venv/bin/python --disable-error-code=import-not-found "${public[@]}"
echo "ci/release.sh: $((SECONDS - began)) s"
