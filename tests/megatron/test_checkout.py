"""Unmodified scripts of a Megatron-LM checkout on text, also packed: context parallelism against one rank.

    PYTHONPATH=path/to/Megatron-LM pytest tests/megatron/test_checkout.py

The checkout needs its compiled dataset helper; a first training compiles it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import state_space_kernels
import training
from training import MODEL, SGD, train

found = find_spec("megatron.core")
CHECKOUT = Path(str(found and found.origin)).parents[2]
pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(
        not (CHECKOUT / "pretrain_hybrid.py").exists(),
        reason="megatron is not a Megatron-LM checkout's: set PYTHONPATH",
    ),
]
PER_TOKEN = "--calculate-per-token-loss"
PACKED = "--dataloader-inter-document-masking"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
HYBRID = (
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern M*- "
    "--mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-heads 8 --mamba-num-groups 4"
)
MODELS = {
    "pretrain_gpt.py": MODEL,
    "pretrain_hybrid.py": f"{MODEL.replace('--num-layers 2 ', '')} {HYBRID}",
}
DIVIDED = {
    "CP 4": (1, "--context-parallel-size 4 --cp-provider striped"),
    "TP 2 x CP 2": (2, f"{TENSOR} --context-parallel-size 2 --cp-provider attention2d --cp-layout zigzag"),
    "CP 4, padded": (1, "--context-parallel-size 4 --cp-provider ring --cp-layout zigzag --cp-pad-sequence"),
    "CP 4, placed": (1, "--context-parallel-size 4 --cp-provider needed --cp-layout documents"),
}
CASES = [
    (script, packed, divided)
    for script in MODELS
    for packed in (False, True)
    for divided in DIVIDED
    if packed or "placed" not in divided
]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags for a corpus of paragraphs from Python's documentation, many of them short."""
    import pydoc_data.topics

    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": part}) for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n"))
    (folder / "topics.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "cp_plugin.cli", "dataset", str(folder / "topics"), str(folder / "topics.jsonl")]
    subprocess.run(command, check=True)
    return f"--data-path {folder / 'topics'}_text_document --split 100,0,0"


@pytest.mark.parametrize(("script", "packed", "divided"), CASES)
def test_losses_are_those_of_one_rank(
    script: str, packed: bool, divided: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SCRIPT", str(CHECKOUT / script))
    monkeypatch.setattr(training, "DATA", f"{text} --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0")
    ranks, flags = DIVIDED[divided]
    length = "--seq-length 57" if "--cp-pad-sequence" in flags else ""
    common = f"{PER_TOKEN} {PACKED if packed else ''} {length}"
    tensor = TENSOR if ranks == 2 else ""
    run: dict[str, object] = {"steps": 4, "model": MODELS[script], "training": SGD}

    def losses(ranks: int, flags: str, prepare: Callable[[], None]) -> list[float]:
        records = train(ranks, f"{common} {flags}", prepare=prepare, **run)
        return next(record.losses for record in records if record.losses)

    want = losses(ranks, tensor, state_space_kernels.install)
    got = losses(4, flags, state_space_kernels.install)
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-5)
    assert want[0] != want[-1]
