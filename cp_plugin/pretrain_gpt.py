"""`python -m cp_plugin.pretrain_gpt [--nproc N] <Megatron flags>`: pretrain a GPT with nothing but Megatron's wheel.

    torchrun --nproc-per-node 8 -m cp_plugin.pretrain_gpt <Megatron flags> --cp-provider striped
    python -m cp_plugin.pretrain_gpt --nproc 4 <Megatron flags> --cp-provider striped        # 4 ranks here, forked

The plugin is added to Megatron first; the training itself is `megatron.models.gpt`. Who has a Megatron-LM checkout
runs its own pretrain_gpt.py with `cp_plugin.run` instead.
"""

from __future__ import annotations

import sys

from cp_plugin.testing.launch import main_with_nproc


def main() -> int:
    """Pretrain as `sys.argv` says; return the exit status.

    Raises ValueError for flags that the pretraining or the plugin refuse (with `--nproc`, the rank's report says so).
    """
    return main_with_nproc(sys.argv[1:], _train, preload=_preload)


def _preload() -> None:
    """What all ranks share: the plugin, and behind it Megatron, which must not be imported before."""
    from cp_plugin.megatron import activate

    activate()
    import cp_plugin.megatron.models.gpt  # noqa: F401


def _train(flags: list[str]) -> None:
    from cp_plugin.megatron.models import gpt
    from cp_plugin.megatron.startup import failures

    sys.argv = [sys.argv[0], *flags]
    with failures.told():
        gpt.train()


if __name__ == "__main__" and (status := main()):
    sys.exit(status)
