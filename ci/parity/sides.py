"""One rank of one training: stock Megatron, upstream context parallelism, or the plugin.

    stock      unmodified Megatron without context parallelism
    upstream   unmodified Megatron with Transformer Engine's on CUDA, PyTorch's ring on the CPU (``upstream``)
    plugin     Megatron with the plugin

On the CPU the first two use the plugin's CPU mode, which stands in for CUDA, without its hooks. All three run the same
script: ``cp_plugin.megatron.models.gpt``, a loop over Megatron's own functions, or the one given by ``--script``.

    torchrun ... ci/parity/sides.py --side plugin --record FOLDER -- <Megatron flags>
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recording import Record, record_into, write

SIDES = ("stock", "upstream", "plugin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training; cases may share it."""

    side: str
    ranks: int
    flags: str
    documents: int = 0
    """Longest document of the mock corpus, in tokens; 0: Megatron's default."""
    kernels: tuple[str, ...] = ()
    """Modules of ``tests`` and ``tests/megatron`` whose ``install`` replaces CUDA kernels by torch."""

    def seeded(self, seed: int) -> Training:
        """The same with another seed than Megatron's default, 1234."""
        return replace(self, flags=f"{self.flags} --seed {seed}")


def preload() -> bool:
    """Import what all ranks share before they are forked, without hooks; returns whether it is CPU mode."""
    from cp_plugin.megatron.cpu import mode as cpu

    on_cpu = cpu.decide("auto")
    if on_cpu:
        cpu.activate()
        import torch._dynamo  # noqa: F401  (every rank's first step would import it)

        read_no_sources()
    return on_cpu


def read_no_sources() -> None:
    """Leave out help texts of flags, for which each rank of Megatron would read its sources."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory._get_field_docstrings = lambda self, source: {}


def train(training: Training, script: str | None = None, log: Path | None = None) -> Record:
    """Train on this rank and return its record.

    log: file for the output of rank 0, beside which the other ranks have theirs (``output``); None: no redirection.
    """
    if log is not None:
        _redirect(output(log, int(os.environ["RANK"])))
    words = training.flags.split()
    sys.argv = ["pretrain_gpt.py", *words]
    on_cpu = preload()
    if training.side == "plugin":
        from cp_plugin.megatron import activate

        activate()
    elif on_cpu:
        from cp_plugin.megatron.cpu import mode as cpu

        sys.argv += [word for flag in cpu.FLAGS for word in flag.spelling.split()]  # the plugin's hook sets them
        if training.side == "upstream":
            import upstream

            upstream.install()
    if training.documents:
        from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

        MockGPTLowLevelDataset.max_sequence_length = training.documents
    _install(training.kernels)
    record = Record()
    record_into(record)
    if script is not None:
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        from cp_plugin.megatron.models import gpt

        gpt.train()
    return record


def output(log: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return log.with_suffix(f".{rank}.log") if rank else log


def _install(kernels: Sequence[str]) -> None:
    if kernels:
        tests = Path(__file__).parents[2] / "tests"
        sys.path += [str(tests / "megatron"), str(tests)]
    for name in kernels:
        importlib.import_module(name).install()


def _redirect(file: Path) -> None:
    with file.open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def main() -> None:
    """A rank started by torchrun or srun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--record", type=Path, required=True, help="folder for every rank's record")
    parser.add_argument("--documents", type=int, default=0, help="longest document of the mock corpus, in tokens")
    parser.add_argument(
        "--kernels", nargs="*", default=[], help="modules of tests and tests/megatron, in the place of CUDA's"
    )
    parser.add_argument("--script", help="a training script, such as Megatron-LM's pretrain_gpt.py")
    parser.add_argument("flags", nargs="+", help="Megatron's, behind --")
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    training = Training(
        side=given.side,
        ranks=int(os.environ["WORLD_SIZE"]),
        flags=" ".join(given.flags),
        documents=given.documents,
        kernels=tuple(given.kernels),
    )
    write(train(training, given.script), given.record, rank)


if __name__ == "__main__":
    main()
