#!/usr/bin/env bash
# Key tests with older supported versions of megatron-core, or of torch (ci/test.sh uses the newest of each).
# Usage: ci/versions.sh [VERSION | DIRECTORY...]    (a directory is a Megatron-LM checkout, such as one of its main)
#        ci/versions.sh torch [VERSION...]          (default: 2.10 2.11)
#
# Of the adapter one or two of each kind: patches, flags, start-up, and training against one rank where it depends most on
# Megatron's code. A torch comes with the Triton that it requires and a NumPy with which that Triton's interpreter works,
# in an environment of its own, .venv-torch-VERSION (4 GB); what depends on torch itself is tested too.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
tests=(
  patches/test_patching.py
  flags/test_flags.py
  flags/test_bad_flags.py
  patches/test_native.py
  "selfcheck/test_planted_faults.py::test_the_self_check_finds_it[own_slicing-striped]"
  runs/test_elastic.py
  mixers/test_packed_places.py
  mixers/test_layout_manager.py
)
if [ "${1:-}" = torch ]; then
  shift
  [ $# -gt 0 ] || set -- 2.10 2.11
  for version; do
    (
      . ci/beside.sh "torch-$version"
      ! outdated ci/versions.sh || install "torch==$version.*"
      pip_install "numpy<2.4" # the interpreter of Triton up to 3.6 does not work with later ones
      "$python" -c 'import numpy, torch, triton; print(*(f"{m.__name__} {m.__version__}" for m in (torch, triton, numpy)))'
      CP_PLUGIN_NIGHTLY=1 run_tests -n 2 -m versions tests/megatron/runs/test_{cases,elastic}.py
      run_tests -n 2 -m "not case" tests/strict tests/fake_cuda tests/engine "${tests[@]/#/tests/megatron/}"
      TRITON_INTERPRET=1 run_tests -n 2 tests/kernels
    )
  done
  exit
fi
[ $# -gt 0 ] || set -- 0.18.2
for version; do
  echo "megatron-core $version"
  export PYTHONPATH="$(bash ci/megatron/overlay.sh "$version"):$PWD"
  CP_PLUGIN_NIGHTLY=1 python -m pytest -q -m versions tests/megatron/runs/test_{cases,elastic}.py
  python -m pytest -q "${tests[@]/#/tests/megatron/}"
done
