"""One rank of one training: stock Megatron, upstream context parallelism, or the plugin.

    stock      unmodified Megatron without context parallelism
    upstream   unmodified Megatron with Transformer Engine's on CUDA, PyTorch's ring on the CPU (``upstream``)
    plugin     Megatron with the plugin

On the CPU the first two use the plugin's CPU mode, which stands in for CUDA, without its hooks. All three run the same
script: ``cp_plugin.megatron.models.gpt``, a loop over Megatron's own functions, or the one given by ``--script``.

    torchrun ... ci/parity/sides.py FOLDER '{"side": "plugin", "ranks": 2, "flags": "..."}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import warm
from training import Record, run, stand_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training; cases may share it."""

    side: Literal["stock", "upstream", "plugin"]
    ranks: int
    flags: str
    documents: int = 0
    """Longest document of the mock corpus, in tokens; 0: Megatron's default."""
    kernels: Sequence[str] = ()
    """Modules of ``tests`` and ``tests/megatron`` whose ``install`` replaces CUDA kernels by torch."""

    def seeded(self, seed: int) -> Training:
        """Return the same with another seed than Megatron's default, 1234."""
        return replace(self, flags=f"{self.flags} --seed {seed}")


def preload() -> bool:
    """Import what all ranks share before they are forked, without hooks; returns whether it is CPU mode."""
    from cp_plugin.megatron.cpu import mode as cpu

    on_cpu = cpu.decide("auto")
    if on_cpu:
        cpu.activate()
        import torch._dynamo  # noqa: F401  (every rank's first step would import it)
    warm.read_no_sources()
    return on_cpu


def train(training: Training, script: str | None = None, log: Path | None = None) -> Record:
    """Train on this rank and return its record.

    log: file for the output of rank 0, beside which the other ranks have theirs (``output``); None: no redirection.
    """
    if log is not None:
        with output(log, int(os.environ["RANK"])).open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    words = training.flags.split()
    sys.argv = ["pretrain_gpt.py", *words]
    on_cpu = preload()
    if training.side == "plugin":
        from cp_plugin.megatron import activate

        activate()
    elif on_cpu:
        from cp_plugin.megatron.cpu import mode as cpu

        sys.argv += " ".join(spelling for _, spelling in cpu.FLAGS.values()).split()  # the plugin's hook sets them
        if training.side == "upstream":
            import upstream

            upstream.install()
    stand_in(training.documents, training.kernels)
    return run(script)


def output(log: Path, rank: int) -> Path:
    """Return the file for a rank's output."""
    return log.with_suffix(f".{rank}.log") if rank else log


def record_file(folder: Path, rank: int) -> Path:
    """Where a rank that is not forked writes its record, at its end."""
    return folder / f"rank-{rank:05d}.pt"


def main(folder: str, training: str, script: str = "") -> None:
    """Train as a rank started by torchrun or srun; training: as JSON."""
    record = train(Training(**json.loads(training)), script or None)
    torch.save(asdict(record), record_file(Path(folder), int(os.environ["RANK"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
