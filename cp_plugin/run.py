"""``python -m cp_plugin.run [--nproc N] SCRIPT ...``: run an unmodified Megatron training script with the plugin.

    torchrun --nproc-per-node 8 -m cp_plugin.run pretrain_gpt.py <Megatron flags> --cp-provider striped
    python -m cp_plugin.run --nproc 4 pretrain_gpt.py <Megatron flags> --cp-provider striped     # 4 ranks here, forked

The script runs as ``__main__``, with its directory first on the path (so its Megatron-LM checkout is used) and its own
``sys.argv``. The plugin patches Megatron before the script starts.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from cp_plugin.engine.common import refusals

USAGE = "python -m cp_plugin.run [--nproc N] SCRIPT [flags of the script and of the plugin]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status.

    Raises:
        ValueError: for a missing script, a script that does not exist, an unknown option in front of it, and flags that
            contradict each other, before Megatron is imported; then as ``cp_plugin.megatron.activate`` does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0 if words else 2
    from cp_plugin.megatron.flags import early

    script, rest = split(words)
    early.check(rest, early.started_ranks(words), f"python -m cp_plugin.run --nproc {{ranks}} {script} ...")
    from cp_plugin.testing.launch import main_with_nproc

    return main_with_nproc(words, _run_script, preload=lambda: _preload(script, rest))


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """The script and its arguments; ValueError if there is none, or it is not a file."""
    from cp_plugin.testing.nproc import split_nproc

    _, rest = split_nproc(list(words))
    if not rest:
        raise ValueError(f"no script given; usage: {USAGE}")
    if rest[0].startswith("-"):
        raise ValueError(f"{rest[0]}: only --nproc may precede the script; put other flags after it; usage: {USAGE}")
    if not os.path.isfile(rest[0]):
        without = "without a Megatron-LM checkout, use -m cp_plugin.pretrain_gpt instead; "
        raise ValueError(f"{rest[0]}: no such script; {without if 'pretrain_gpt' in rest[0] else ''}usage: {USAGE}")
    try:
        ast.parse(Path(rest[0]).read_bytes(), rest[0])
    except (SyntaxError, ValueError) as error:
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{rest[0]}: not a Python script ({error.args[0]}{at}); usage: {USAGE}") from None
    return rest[0], rest[1:]


def _preload(script: str, rest: Sequence[str]) -> None:
    """Set up what all ranks share, before they are forked: the path, the plugin and Megatron."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    from cp_plugin.megatron import activate

    activate(rest)
    import torch._dynamo  # noqa: F401  (every rank's first step would import it, for more than a second)


def _run_script(words: list[str]) -> None:
    from cp_plugin.megatron.startup import failures

    script, rest = split(words)
    sys.argv = [script, *rest]
    with failures.reported():
        runpy.run_path(script, run_name="__main__")


def _print_help() -> None:
    from cp_plugin.megatron.flags.args import add_arguments

    about = "Run a Megatron training script with context parallelism. SCRIPT --help lists Megatron's flags too."
    parser = argparse.ArgumentParser(usage=USAGE, description=about, allow_abbrev=False)
    parser.add_argument("--nproc", metavar="N", help="start N ranks on this machine; leave out under torchrun")
    add_arguments(parser).print_help()


if __name__ == "__main__":
    raise SystemExit(refusals.exit_status(main))
