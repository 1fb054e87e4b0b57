"""One rank of one training: stock Megatron, upstream context parallelism, or the plugin.

    stock      Megatron as it is, without context parallelism
    upstream   Megatron as it is, with its own: Transformer Engine's on CUDA, PyTorch's ring on the CPU (``upstream``)
    plugin     Megatron with the plugin

On the CPU the first two are in the plugin's CPU mode, which stands in for CUDA, and have none of its hooks. All three
run one script: ``cp_plugin.megatron.models.gpt``, Megatron's own functions in a loop, or the one that ``--script``
names.

    torchrun ... ci/parity/sides.py --side plugin --record FOLDER -- <Megatron flags>      every rank writes its record
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
    """One training: what is run once however many cases need it."""

    side: str
    ranks: int
    flags: str
    documents: int = 0
    """Longest document of the mock corpus, in tokens; 0: as Megatron has it."""
    kernels: tuple[str, ...] = ()
    """Modules of ``tests`` and ``tests/megatron`` whose ``install`` puts torch in the place of kernels of CUDA."""

    def seeded(self, seed: int) -> Training:
        """The same with other weights and batches than those of Megatron's default, 1234."""
        return replace(self, flags=f"{self.flags} --seed {seed}")


def preload() -> bool:
    """What all ranks of all sides share, before they are forked; whether it is CPU mode. No hook is put in place."""
    from cp_plugin.megatron.cpu import mode as cpu

    on_cpu = cpu.decide("auto")
    if on_cpu:
        cpu.activate()
        import torch._dynamo  # noqa: F401  (every rank's first step would import it)

        read_sources_once()
    return on_cpu


def read_sources_once() -> None:
    """Here, and not in every rank that is forked from this process: that would be half of a rank's time.

    Megatron reads its sources for help texts of flags, which nobody asks for here; the plugin for fingerprints of what
    it is about to replace.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    from cp_plugin.megatron.patches import patching, source
    from cp_plugin.megatron.patches.fingerprints import FINGERPRINTS

    ArgumentGroupFactory._get_field_docstrings = lambda self, source: {}
    source.of_object = functools.cache(source.of_object)
    here = patching.megatron_version()
    for target in (t for t, known in FINGERPRINTS.items() if any(here in versions for versions in known.values())):
        with contextlib.suppress(TypeError):  # a class of Transformer Engine's, where that is not installed
            source.of_object(patching.original(target))


def train(training: Training, script: str | None = None, log: Path | None = None) -> Record:
    """Train on this rank; its record. Raises what the training raises.

    log: where the output of rank 0 goes; that of the others is dropped. None: it stays where it is.
    """
    if log is not None:
        _redirect(log if os.environ["RANK"] == "0" else Path(os.devnull))
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
    """A rank that torchrun or srun has started."""
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
