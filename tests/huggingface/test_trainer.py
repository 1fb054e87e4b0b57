"""transformers' own ``Trainer``: its example equals one rank, and set-ups that train on something else are refused.

Kind: the stock ``Trainer`` gives each rank rows of its own; a collator that shards them went on with a plausible loss
(AutoModel 3359).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import model_of, needs_transformers, tokens

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import RankError, run_ranks

try:
    import accelerate
except ImportError:
    accelerate = None
pytestmark = [
    needs_transformers,
    pytest.mark.skipif(accelerate is None, reason="accelerate is not installed: pip install accelerate"),
]


@pytest.mark.parametrize("flags", [[], ["--bf16", "--provider", "needed"]], ids=["float32", "bf16"])
def test_the_example(flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses of training with accumulation, and of the evaluation."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trainer.py"))
    monkeypatch.setattr(sys, "argv", ["trainer.py", "--ranks", "2", "--steps", "3", "--seq-length", "64", *flags])
    example["compared"](example["arguments"]())
    assert "2 ranks equal one within" in capfd.readouterr().out


def trained(model: Any, collate: Any, rows: list[dict[str, Any]], path: Path, **more: Any) -> list[float]:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=more.pop("per_device_train_batch_size", 1),
        max_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_rows_of_each_ranks_own_are_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": row} for row in tokens(64, 16)]

    def rank() -> None:
        cp = ContextParallel("ring", group=dist.group.WORLD)
        model = model_of("llama")
        huggingface.apply(model, cp)

        def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
            return huggingface.shard(cp, torch.stack([example["input_ids"] for example in examples]))

        trained(model, collate, rows, tmp_path)

    with pytest.raises(RankError, match=r"input_ids \(rank 0 and rank 1 disagree\)"):
        run_ranks(rank, 2, init_process_group=True)


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_rows_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """Rows of other lengths, padded or packed."""
    import transformers

    lengths = [20, 31, 17, 44, 9, 40, 33, 28] * 2
    rows = [{"input_ids": tokens(64, 16)[i, :n].tolist()} for i, n in enumerate(lengths)]

    def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        size = max(len(example["input_ids"]) for example in examples)
        ids = torch.zeros(len(examples), size, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, example in enumerate(examples):
            ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
            mask[row, : len(example["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask}

    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True) if kind == "packed" else padded

    def losses(cp: ContextParallel, each: int) -> list[float]:
        model = model_of("llama")
        huggingface.apply(model, cp)
        return trained(model, huggingface.Collator(cp, collate), rows, tmp_path, per_device_train_batch_size=each)

    def many() -> list[float]:
        return losses(ContextParallel("ring", group=dist.group.WORLD, layout="zigzag"), 2)

    def one() -> list[float]:
        return losses(ContextParallel("ring"), 4)

    want = run_ranks(one, 1, init_process_group=True)[0]
    for got in run_ranks(many, 2, init_process_group=True):
        assert got == pytest.approx(want, rel=1e-5)


def test_collators_refuse_what_they_cannot_do() -> None:
    cp = ContextParallel("ring")
    ids = tokens(16, 2)
    left = torch.ones_like(ids)
    left[0, :3] = 0
    with pytest.raises(ValueError, match="padding on the left: set the tokenizer's padding_side to right"):
        huggingface.Collator(cp, lambda examples: {"input_ids": ids, "attention_mask": left})([])
    loader = torch.utils.data.DataLoader(
        [{"input_ids": row} for row in ids], batch_size=2, collate_fn=huggingface.Collator(cp), num_workers=1
    )
    with pytest.raises(ValueError, match="dataloader_num_workers=0"):
        next(iter(loader))
