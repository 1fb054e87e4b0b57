#!/usr/bin/env bash
# Tests with the real Hugging Face transformers and tokenizers, and of --sft with a Megatron-LM checkout in PYTHONPATH.
# Usage: ci/huggingface.sh [pytest arguments]
#
# Uses its own environment, .venv-huggingface, because Megatron imports transformers wherever it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh huggingface
if outdated pyproject.toml ci/constraints.txt; then
  install -c ci/constraints.txt -r <(extras huggingface tokenizers sft) accelerate peft
fi
[ $# -gt 0 ] || set -- tests/huggingface tests/fake_cuda/test_host_waits.py tests/tools/test_dataset.py tests/megatron/runs/test_sft.py
run_tests "$@"
