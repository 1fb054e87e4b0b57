"""Unmodified scripts of a Megatron-LM checkout on text, also packed: context parallelism against one rank.

    PYTHONPATH=path/to/Megatron-LM pytest tests/megatron/runs/test_checkout.py

The checkout needs its compiled dataset helper; a first training compiles it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import training
from training import PACKED, Record, train

spec = find_spec("megatron.core")
CHECKOUT = Path(str(spec and spec.origin)).parents[2]
IN_A_CHECKOUT = pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(
        not (CHECKOUT / "pretrain_hybrid.py").exists(),
        reason="megatron is not a Megatron-LM checkout's: set PYTHONPATH",
    ),
]
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
HYBRID = (
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern M*- "
    "--mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-heads 8 --mamba-num-groups 4"
)
SCRIPTS = {"pretrain_gpt.py": "", "pretrain_hybrid.py": HYBRID}
"""Script -> flags of its model."""
DIVIDED = {
    "CP 4": (1, "--context-parallel-size 4 --cp-provider striped"),
    "TP 2 x CP 2": (2, f"{TENSOR} --context-parallel-size 2 --cp-provider attention2d --cp-layout zigzag"),
    "CP 4, padded": (1, "--context-parallel-size 4 --cp-provider ring --cp-layout zigzag --cp-pad-sequence"),
    "CP 4, placed": (1, "--context-parallel-size 4 --cp-provider needed --cp-layout documents"),
}
CASES = [
    (script, packed, divided)
    for script in SCRIPTS
    for packed in (False, True)
    for divided in DIVIDED
    if packed or "placed" not in divided
]


def run_script(monkeypatch: pytest.MonkeyPatch, script: str, ranks: int, flags: str, **more: Any) -> list[Record]:
    """As ``train``, by a script of the checkout, whose losses are summed over tokens."""
    monkeypatch.setattr(training, "SCRIPT", str(CHECKOUT / script))
    return train(ranks, f"{SCRIPTS[script]} --calculate-per-token-loss {flags}", **more)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags for a corpus of paragraphs from Python's documentation, many of them short."""
    import pydoc_data.topics

    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": part}) for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n"))
    (folder / "topics.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "cp_plugin.tools", "dataset", str(folder / "topics"), str(folder / "topics.jsonl")]
    subprocess.run(command, check=True)
    return f"--data-path {folder / 'topics'}_text_document --split 100,0,0"


@pytest.mark.parametrize(("script", "packed", "divided"), CASES)
def test_losses_are_those_of_one_rank(
    script: str, packed: bool, divided: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "DATA", f"{text} --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0")
    ranks, flags = DIVIDED[divided]
    common = f"{PACKED if packed else ''} {'--seq-length 57' if '--cp-pad-sequence' in flags else ''}"

    def losses(ranks: int, flags: str) -> list[float]:
        records = run_script(monkeypatch, script, ranks, f"{common} {flags}", steps=4)
        return next(record.losses for record in records if record.losses)

    want, got = losses(ranks, TENSOR if ranks == 2 else ""), losses(4, flags)
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-5)
    assert want[0] != want[-1]
