#!/usr/bin/env bash
# Unpack another megatron-core beside the installed one, and print the folder: PYTHONPATH=FOLDER uses it.
# Usage: ci/megatron/overlay.sh VERSION     (one that has a file VERSION.txt here, with the hash of its wheel)
#        ci/megatron/overlay.sh DIRECTORY   (a Megatron-LM checkout; the compiled dataset helper is the installed one's)
set -euo pipefail
cd "$(dirname "$0")/../.."
version="$1"
if [ -d "$version/megatron" ]; then
  folder=".venv/megatron/checkout"
  rm -rf "$folder"
  mkdir -p "$folder"
  cp -r "$version/megatron" "$folder"
  cp .venv/lib/python3*/site-packages/megatron/core/datasets/helpers_cpp*.so "$folder/megatron/core/datasets/"
  echo "$PWD/$folder"
  exit
fi
folder=".venv/megatron/$version"
if [ ! -d "$folder/megatron" ] || [ "ci/megatron/$version.txt" -nt "$folder" ]; then
  rm -rf "$folder" "$folder.part"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --target "$folder.part" -r "ci/megatron/$version.txt" >&2
  mv "$folder.part" "$folder"
  touch "$folder"
fi
echo "$PWD/$folder"
