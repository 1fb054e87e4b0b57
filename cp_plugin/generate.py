"""`python -m cp_plugin.generate --prompt TEXT <flags of the training> --load DIR`: text from a trained model.

    python -m cp_plugin.generate --prompt "def main" --new-tokens 64 <Megatron flags> --load checkpoints \\
        --cp-linear-attention gla --cp-layer-pattern LLLN --context-parallel-size 1

Linear layers keep a state of fixed size, softmax layers keys and values (`cp_plugin.megatron.decoding`); the likeliest
token is taken each time. The checkpoint may come from any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from cp_plugin.launch import main_with_nproc


def main() -> int:
    """Generate as `sys.argv` says; return the exit status.

    Raises ValueError for flags that generation, the training or the plugin refuse.
    """
    parser = argparse.ArgumentParser(prog="python -m cp_plugin.generate", allow_abbrev=False)
    parser.add_argument("--prompt", required=True, help="the beginning of the text")
    parser.add_argument("--new-tokens", type=int, default=64, help="how many tokens to add (64)")
    parser.add_argument("--bytes", action="store_true", help="tokens are bytes, as in data from examples/corpus.py")
    own, rest = parser.parse_known_args()
    if not own.prompt or own.new_tokens < 1:
        raise ValueError("--prompt must not be empty, and --new-tokens must be 1 or more")
    if "RANK" not in os.environ and rest[:1] != ["--nproc"]:
        rest = ["--nproc", "1", *rest]
    return main_with_nproc(rest, partial(_generate, own), preload=partial(_preload, rest))


def _preload(flags: list[str]) -> None:
    """What all ranks share."""
    from cp_plugin.megatron import activate

    activate(flags)
    import cp_plugin.megatron.gpt  # noqa: F401


def _generate(own: argparse.Namespace, flags: list[str]) -> None:
    from cp_plugin.megatron import text

    if not any(flag.partition("=")[0] == "--load" for flag in flags):
        raise ValueError("generation needs the weights of a training: add --load with the directory of a checkpoint")
    sys.argv = [sys.argv[0], *flags, "--no-load-optim", "--no-load-rng"]
    text.write(own.prompt, own.new_tokens, as_bytes=own.bytes)


if __name__ == "__main__" and (status := main()):
    sys.exit(status)
