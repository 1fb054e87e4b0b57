"""One training of ``replay.py``, on forked CPU ranks, with the Megatron that PYTHONPATH names first.

    replay_case.py TREE CASE start    two context-parallel ranks, to the end of the first step
    replay_case.py TREE CASE train    two steps on two context-parallel ranks, compared with one rank

The last line that it prints is JSON: see ``Result``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MORE = "--micro-batch-size 1 --global-batch-size 2 --clip-grad 1e9 --calculate-per-token-loss --cp-device cpu"
"""Flags beside the model, data and optimizer of ``tests/training.py``."""
STATES = (
    "--mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-heads 4 --mamba-num-groups 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 16 --linear-num-key-heads 4 "
    "--linear-num-value-heads 4"
)
STACK = f"--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec {STATES} --hybrid-layer-pattern"
DIVIDED = "--context-parallel-size 2 --cp-provider striped"
PACKS_BY_FLAG = "--dataloader-inter-document-masking"
TIMEOUT_S = 300.0
_ENDS = {
    "refused": r"cp_plugin\.|ValueError: .*(cp_plugin|--cp-)",
    "lacks": "ModuleNotFoundError: No module named '(?!megatron|cp_)|ValueError: .*, which is not installed",
}
"""State -> how the last exception begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny model and the script that trains it."""

    flags: str = ""
    script: str = "pretrain_gpt.py"
    """In the tree."""
    holds: tuple[str, str] = ("pretrain_gpt.py", "")
    """(file, text): a tree has the model if this file of it contains this text."""
    packed: bool = False
    trained: bool = False

    def known_to(self, tree: Path) -> bool:
        file, text = self.holds
        return _contains(tree / file, text) and (tree / self.script).is_file()

    def of(self, tree: Path) -> tuple[Path, str]:
        """The script and its flags in this tree; before Megatron packed documents by a flag, a script does."""
        if not self.packed:
            return tree / self.script, self.flags
        if _contains(tree / self.script, PACKS_BY_FLAG.removeprefix("--").replace("-", "_")):
            return tree / self.script, f"{self.flags} {PACKS_BY_FLAG}"
        return HERE / "packed_gpt.py", f"{self.flags} --sft"


CASES = {
    "gpt": Case(),
    "packed": Case(packed=True, trained=True),
    "moe": Case(flags="--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"),
    "hybrid": Case(
        flags=f"{STACK} M*-",
        script="pretrain_hybrid.py",
        holds=("megatron/core/models/hybrid/hybrid_model.py", "class HybridModel"),
        trained=True,
    ),
    "delta net": Case(
        flags=f"{STACK} MG*-",
        script="pretrain_hybrid.py",
        holds=("megatron/core/models/hybrid/hybrid_block.py", "gdn_layer"),
        trained=True,
    ),
}


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of a case on one commit."""

    state: str
    """passed; refused: by a message of the plugin; differs: from one rank; lacks: a package that this Megatron imports;
    alone: fails on one rank without a provider, or as Megatron imports its own modules; failed: by anything else."""
    message: str = ""
    losses: list[float] | None = None
    """Of both steps, with context parallelism; this and the largest relative differences below: trainings only."""
    loss: float | None = None
    norm: float | None = None
    gradient: float | None = None


def run(tree: Path, name: str, what: str) -> Result:
    """Start or train a case in this process, which has imported no Megatron yet."""
    from cp_plugin.testing.launch import RankError

    script, flags = CASES[name].of(tree)
    os.environ["CP_PLUGIN_TEST_SCRIPT"] = str(script)  # read by ``training``
    try:
        from cp_plugin.megatron import activate

        activate(["--cp-device", "cpu"])
        import torch._dynamo  # noqa: F401  (every rank's first step would import it)
    except Exception as error:
        got = _ended(f"{type(error).__name__}: {error}")
        inside = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(f"{tree.resolve()}{os.sep}")
        if got.state == "failed" and isinstance(error, ImportError) and inside:
            got.state = "alone"
        return got
    from training import SGD, SHORT, train

    def ranks(number: int, flags: str) -> list[Any] | Result:
        steps = {"start": 1, "train": 2}[what]
        try:
            return train(number, flags, steps=steps, training=f"{SGD} {MORE}", documents=SHORT, timeout=TIMEOUT_S)
        except RankError as error:
            return _ended(error.traceback)
        except AssertionError as error:  # a rank left early
            return Result(state="failed", message=str(error))

    got = ranks(2, f"{flags} {DIVIDED}")
    if isinstance(got, Result):
        if got.state == "failed" and isinstance(ranks(1, flags), Result):
            got.state = "alone"
        return got
    if what == "start":
        return Result(state="passed")
    want = ranks(1, flags)
    return want if isinstance(want, Result) else _compared(got, want)


def _compared(got: list[Any], want: list[Any]) -> Result:
    from training import GRADIENT, LOSS, gap

    try:
        found = gap(got, want)
    except ValueError as error:
        return Result(state="differs", message=str(error))
    losses = next(record.losses for record in got if record.losses)
    right = found.loss <= LOSS and found.norm <= LOSS and found.grad <= GRADIENT
    return Result(
        state="passed" if right else "differs",
        message="" if right else f"beyond {LOSS:.0e} (loss, gradient norm) or {GRADIENT:.0e} ({found.where})",
        losses=losses,
        loss=found.loss,
        norm=found.norm,
        gradient=found.grad,
    )


def _ended(report: str) -> Result:
    """Of a report that ends with an exception, as a traceback does."""
    found = list(re.finditer(r"^[\w.]+(?:Error|Exception): ", report, re.MULTILINE))
    message = report[found[-1].start() :].rstrip() if found else report.strip()
    state = next((state for state, pattern in _ENDS.items() if re.match(pattern, message, re.DOTALL)), "failed")
    return Result(state=state, message=message.removeprefix("ValueError: "))


def _contains(file: Path, text: str) -> bool:
    return file.is_file() and text in file.read_text(encoding="utf-8", errors="replace")


def main(argv: list[str]) -> int:
    tree, name, what = argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = asdict(run(Path(tree), name, what))
    print(json.dumps({name: value for name, value in found.items() if value is not None}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
