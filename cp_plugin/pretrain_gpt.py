"""`python -m cp_plugin.pretrain_gpt [--nproc N] <Megatron flags>`: pretrain a GPT with Megatron's wheel alone.

    torchrun --nproc-per-node 8 -m cp_plugin.pretrain_gpt <Megatron flags> --cp-provider striped
    python -m cp_plugin.pretrain_gpt --nproc 4 <Megatron flags> --cp-provider striped        # 4 ranks here, forked

The training is `megatron.models.gpt`. With a Megatron-LM checkout, run its pretrain_gpt.py by `cp_plugin.run` instead.
"""

from __future__ import annotations

import sys

from cp_plugin.engine.common import refusals
from cp_plugin.megatron.flags import early
from cp_plugin.testing.nproc import split_nproc


def main() -> int:
    """Pretrain with the flags of `sys.argv`; return the exit status.

    Raises ValueError for flags that are refused; what the plugin's flags alone tell is refused before Megatron is
    imported. With `--nproc`, a rank's later refusal is printed.
    """
    words = sys.argv[1:]
    _, flags = split_nproc(words)
    early.check(flags, early.started_ranks(words), "python -m cp_plugin.pretrain_gpt --nproc {ranks} ...")
    from cp_plugin.testing.launch import main_with_nproc

    return main_with_nproc(words, _train, preload=_preload)


def _preload() -> None:
    """Import the plugin and then Megatron, which must not be imported earlier, before ranks are forked."""
    from cp_plugin.megatron import activate

    activate()
    import cp_plugin.megatron.models.gpt  # noqa: F401


def _train(flags: list[str]) -> None:
    from cp_plugin.megatron.models import gpt
    from cp_plugin.megatron.startup import failures

    sys.argv = [sys.argv[0], *flags]
    with failures.reported():
        gpt.train()


if __name__ == "__main__" and (status := refusals.exit_status(main)):
    sys.exit(status)
