#!/usr/bin/env bash
# Train a small GPT with Megatron-LM on packed documents of chat-like lengths, on one rank and on four that shard each pack
# by its documents, and compare. Needs Linux and Python 3.12, no GPU. Usage: examples/packed.sh [options of packed.py]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh
exec .venv/bin/python examples/packed.py "$@"
