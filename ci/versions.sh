#!/usr/bin/env bash
# Key tests of the adapter with older supported versions of megatron-core (ci/test.sh uses the newest).
# Usage: ci/versions.sh [VERSION | DIRECTORY...]    (a directory is a Megatron-LM checkout, such as one of its main)
#
# One or two of each kind: patches, flags, start-up, and training against one rank where it depends most on Megatron's code.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 CP_PLUGIN_ALL=1
tests=(
  test_patching.py
  test_flags.py
  test_bad_flags.py
  test_native.py
  test_startup.py::test_a_script_that_slices_otherwise_is_refused
  "test_parity.py::test_context_parallel_alone[striped-2]"
  "test_parity.py::test_variants[sequence parallel]"
  "test_parity.py::test_variants[virtual pipeline]"
  "test_parity.py::test_variants[full recompute]"
  "test_parity.py::test_variants[mixture of experts]"
  test_parity.py::test_auxiliary_losses_of_experts
  "test_mtp.py::test_as_on_one_rank[striped, two depths]"
  "test_mla.py::test_models[yarn and a latent query]"
  "test_masks_in_training.py::test_windows_and_offsets[window]"
  "test_linear_parity.py::test_softmax_layers_between[LN-gla]"
  test_settings_in_checkpoint.py
  test_elastic.py::test_a_training_is_handed_on
  test_packed_models.py
  test_layout_manager.py
)
[ $# -gt 0 ] || set -- 0.17.1 0.18.2
for version; do
  echo "megatron-core $version"
  PYTHONPATH="$(bash ci/megatron/overlay.sh "$version"):$PWD" python -m pytest -q "${tests[@]/#/tests/megatron/}"
done
