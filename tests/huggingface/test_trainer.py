"""transformers' own ``Trainer``: its example equals one rank, and set-ups that train on something else are refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MISSING, Trained, compare, divided, model_of, run_on_ranks, tokens, train
from torch.nn.utils.rnn import pad_sequence

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import RankError

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
transformers = pytest.importorskip("transformers", reason=MISSING)


@pytest.mark.parametrize("flags", [[], ["--bf16", "--provider", "needed"]], ids=["float32", "bf16"])
def test_the_example(flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses of training with accumulation, and of the evaluation."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trainer.py"))
    monkeypatch.setattr(sys, "argv", ["trainer.py", "--ranks", "2", "--steps", "3", "--seq-length", "64", *flags])
    example["compared"](example["arguments"]())
    assert "2 ranks equal one within" in capfd.readouterr().out


def trainer_of(model: Any, collate: Any, path: Path, more: dict[str, Any], **others: Any) -> Any:
    """more: arguments of training; others: of Trainer."""
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    args = transformers.TrainingArguments(str(path), save_strategy="no", **quiet | more)
    return transformers.Trainer(model=model, args=args, data_collator=collate, **others)


def trained(model: Any, collate: Any, rows: list[dict[str, Any]], path: Path, **more: Any) -> list[float]:
    function, evaluated_first = more.pop("compute_loss_func", None), more.pop("evaluated_first", False)
    more = {"per_device_train_batch_size": 1, "max_steps": 2, "logging_steps": 1} | more
    trainer = trainer_of(model, collate, path, more, train_dataset=rows, compute_loss_func=function)
    if evaluated_first:
        trainer.evaluate(rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


LENGTHS = [20, 31, 17, 44, 9, 40, 33, 28] * 2
ROWS = [{"input_ids": tokens(64, 16)[i, :n].tolist()} for i, n in enumerate(LENGTHS)]


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids, mask = (pad_sequence(each, batch_first=True) for each in (rows, list(map(torch.ones_like, rows))))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packs(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Two documents in each row."""
    batch = padded(examples)
    n, halves = batch["input_ids"].size(1), [len(example["input_ids"]) // 2 for example in examples]
    positions = torch.stack([torch.cat([torch.arange(k), torch.arange(n - k)]) for k in halves])
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}


def flat(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(examples)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([row | {"input_ids": row["input_ids"][:9]} for row in ROWS])


def smooth(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """As a user's own loss function of whole rows: logits and labels that are not shifted."""
    logits = outputs["logits"][:, :-1].float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.2, reduction="sum")
    return loss / num_items_in_batch


CASES: dict[str, dict[str, Any]] = {
    "padded": {"collate": padded},
    "no collate": {"collate": None},
    "rows of packs": {"collate": packs},
    "packed": {"collate": flat},
    "streaming": {"collate": None, "rows": Stream()},
    "workers": {"collate": padded, "dataloader_num_workers": 1},
    "label smoothing": {"collate": padded, "label_smoothing_factor": 0.2},
    "own loss": {"collate": padded, "compute_loss_func": smooth},
    "a grid": {"collate": packs, "provider": "attention2d", "ranks": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_rank(name: str, tmp_path: Path) -> None:
    """Kind: what Trainer and its users see of a batch is not this rank's rows. With the same rows in a batch; stock's
    own loss divides by all labels of a row, and the label smoother asks for logits."""
    more = dict(CASES[name])
    collate, rows, ranks = more.pop("collate"), more.pop("rows", ROWS), more.pop("ranks", 2)
    provider = more.pop("provider", "ring")

    def many(cp: ContextParallel) -> list[float]:
        return trained(divided(cp), huggingface.Collator(cp, collate), rows, tmp_path, **more)

    def one(cp: ContextParallel) -> list[float]:
        whole = huggingface.Collator(cp, collate)
        return trained(model_of("llama"), whole, rows, tmp_path, per_device_train_batch_size=ranks, **more)

    want = run_on_ranks(one, ranks=1)[0]
    for got in run_on_ranks(many, provider, ranks):
        assert got == pytest.approx(want, rel=1e-5)


def likelihood(p: Any) -> dict[str, float]:
    logits, labels = torch.tensor(p.predictions[:, :-1]), torch.tensor(p.label_ids[:, 1:])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return {"likelihood": loss.item(), "right": (logits.argmax(-1) == labels).float().mean().item()}


@pytest.mark.parametrize(
    ("number", "place"),
    [
        (5, {"layout": "contiguous"}),
        (1, {"layout": "zigzag"}),
        (6, {"layout": "zigzag"}),
        (5, {"provider": "usp", "head_parallel": 2}),
    ],
    ids=str,
)
def test_evaluation_and_prediction_equal_one_rank(number: int, place: dict[str, str], tmp_path: Path) -> None:
    """Kind: ranks are taken for rows. Losses of the last, incomplete batch were cut by rank, a rank's tokens came back
    as rows, and labels shifted (4.17 was 3.33 to 7.31)."""
    rows = [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(32) < 9 + 2 * i, -100)}
        for i, row in enumerate(tokens(32, number))
    ]

    def evaluated(model: Any, collate: Any, each: int) -> tuple[Any, ...]:
        seen: list[torch.Size] = []

        def kept(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            seen.append(logits.shape[1:2] + labels.shape[1:])
            return logits

        own = {"compute_metrics": likelihood, "preprocess_logits_for_metrics": kept}
        trainer = trainer_of(model, collate, tmp_path, {"per_device_eval_batch_size": each}, **own)
        output = trainer.predict(rows)
        assert set(seen) == {(32, 32)}
        loss = trainer.evaluate(rows)["eval_loss"]
        metrics = output.metrics
        return loss, metrics["test_likelihood"], metrics["test_right"], output.predictions, output.label_ids

    def many(cp: ContextParallel) -> tuple[Any, ...]:
        return evaluated(divided(cp), huggingface.Collator(cp), 1)

    ranks = 4 if "provider" in place else 2
    want = run_on_ranks(lambda cp: evaluated(model_of("llama"), None, ranks), ranks=1)[0]
    for got in run_on_ranks(many, ranks=ranks, **place):
        assert got[:3] == pytest.approx(want[:3], rel=1e-5)
        assert abs(got[3] - want[3]).max() <= 1e-4 and (got[4] == want[4]).all()


def test_evaluation_of_flat_packs(tmp_path: Path) -> None:
    """Their rows hold several examples, some of which fill up the last batch."""
    rows = [row | {"labels": row["input_ids"]} for row in ROWS[:5]]

    def loss(model: Any, collate: Any, each: int) -> float:
        trainer = trainer_of(model, collate, tmp_path, {"per_device_eval_batch_size": each})
        return trainer.evaluate(rows)["eval_loss"]

    def many(cp: ContextParallel) -> float:
        return loss(divided(cp, check=False), huggingface.Collator(cp, flat), 2)

    want = run_on_ranks(lambda cp: loss(model_of("llama"), padded, 4), ranks=1)[0]
    assert run_on_ranks(many) == pytest.approx([want] * 2, rel=1e-5)


def rows_of(rank: int, length: int = 32, number: int = 2) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(length, 4)[2 * rank : 2 * rank + number]}


def left(n: int) -> torch.Tensor:
    return (torch.arange(32) >= torch.tensor([[n], [0]])).long()


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "left padding": ("rank 1: .* padding on the left: set the tokenizer's padding_side", {"attention_mask": left(3)}),
    "a mask of its own": ("rank 1: .* `token_type_ids` in rows", {"token_type_ids": left(3)}),
    "positions": ("rank 1: .* position_ids that do not count from 0", {"position_ids": torch.arange(5, 37)[None]}),
    "documents and a mask": (
        "rank 1: .* documents and an attention_mask",
        {"position_ids": torch.arange(32)[None] % 16, "attention_mask": left(0)},
    ),
    "bounds": ("rank 1: cu_seqlens must increase", {"cu_seq_lens_q": torch.tensor([0, 7])}),
    "another shape": (r"rank 1: .* `attention_mask` of \[2, 31\]", {"attention_mask": left(3)[:, 1:]}),
    "logits_to_keep": ("rank 1: .* logits_to_keep", {"logits_to_keep": 3}),
    "counts": ("num_items_in_batch: leave average_tokens_across_devices on", {"num_items_in_batch": 7}),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_cannot_divide_is_refused_by_all(what: str) -> None:
    """Kind: an error on one rank, and a collective in which the others wait; or an argument that is dropped."""
    message, more = ALONE[what]

    def rank(cp: ContextParallel) -> None:
        model = divided(cp, check=False)
        batch = huggingface.Collator(cp, lambda rows: rows_of(cp.index) | (more if cp.index else {}))([])
        for _ in range(6):  # beyond the calls that are compared
            with pytest.raises(ValueError, match=message):
                model(**({"num_items_in_batch": 9} | batch))

    run_on_ranks(rank)


@pytest.mark.parametrize("what", ["packs on one rank", "other lengths", "other numbers of rows"])
def test_ranks_with_rows_of_other_shapes(what: str) -> None:
    other = {"other lengths": (1, 20, 2), "other numbers of rows": (1, 32, 1)}.get(what, (1,))
    rows: list[dict[str, Any]] = [rows_of(0), rows_of(*other)]
    if what == "packs on one rank":
        rows[1]["position_ids"] = torch.cat([torch.arange(12), torch.arange(20)])[None]
    batches = [huggingface.Collator(ContextParallel("ring"), lambda _, one=one: one)([]) for one in rows]
    model = model_of("llama")
    alone = [train(model, batch | {"num_items_in_batch": 100}) for batch in batches]
    one = Trained(sum(x.loss for x in alone), {k: sum(x.gradients[k] for x in alone) for k in alone[0].gradients})

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        return compare(model, batches[cp.index] | {"num_items_in_batch": 100}, one)

    assert max(run_on_ranks(rank, "striped")) <= 1e-5


REFUSED: dict[str, dict[str, Any]] = {
    "even_batches=False of accelerate": {"accelerator_config": {"even_batches": False}},
    "training without DDP.*eval_on_start=True": {"evaluated_first": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_accelerate_does_otherwise_is_refused(message: str, tmp_path: Path) -> None:
    """After an evaluation, Trainer leaves DDP out: each rank followed the gradients of its own tokens."""

    def rank(cp: ContextParallel) -> None:
        trained(divided(cp, check=False), huggingface.Collator(cp), ROWS[:3], tmp_path, **REFUSED[message])

    with pytest.raises(RankError, match=message):
        run_on_ranks(rank)
