#!/usr/bin/env bash
# Tests with the real Hugging Face transformers, with the tokenizers of datasets, and, with a Megatron-LM checkout in
# PYTHONPATH, of its --sft. Usage: ci/huggingface.sh [pytest arguments]
#
# They have an environment of their own, .venv-huggingface, because Megatron imports transformers where it is installed;
# all else is shared with .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/beside.sh huggingface
if outdated pyproject.toml ci/constraints.txt; then
  install -c ci/constraints.txt -r <(extras huggingface tokenizers sft)
fi
[ $# -gt 0 ] || set -- tests/test_huggingface.py tests/test_dataset_tokenizers.py tests/megatron/test_sft.py
run_tests "$@"
