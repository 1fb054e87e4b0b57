#!/usr/bin/env bash
# Tests with the real Hugging Face transformers, with the tokenizers of datasets, and, with a Megatron-LM checkout in
# PYTHONPATH, of its --sft. Usage: ci/huggingface.sh [pytest arguments]
#
# They have an environment of their own, .venv-huggingface, because Megatron imports transformers where it is installed;
# all else is shared with .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh dev
began=$SECONDS
python="$PWD/.venv-huggingface/bin/python"
[ -x "$python" ] || .venv/bin/python -m venv .venv-huggingface
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
.venv/bin/python -c "$packages" >"$("$python" -c "$packages")/shared.pth"
stamp=.venv-huggingface/installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ ci/constraints.txt -nt "$stamp" ]; then
  wanted='
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["huggingface"], *extras["tokenizers"], *extras["sft"], sep="\n")'
  "$python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -r <("$python" -c "$wanted")
  touch "$stamp"
fi
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- tests/test_huggingface.py tests/test_dataset_tokenizers.py tests/megatron/test_sft.py
"$python" -m pytest "$@"
echo "ci/huggingface.sh: $((SECONDS - began)) s"
