"""Trees of a batch; whatever would be wrong with a model or its input is refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import compare, model_of, run_on_ranks, tokens, train, transformers

from cp_plugin import ContextParallel, Tree, huggingface
from cp_plugin.testing.launch import run_ranks


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'cp-plugin\[huggingface\]'"):
        huggingface.apply(torch.nn.Linear(1, 1), ContextParallel("ring"))  # type: ignore[arg-type]


TREE = Tree((30, 11, 9, 4, 20, 0, 27, 15, 12), (-1, 0, 1, 1, 0, 4, -1, 6, 6))


def average_sequences(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss over the labels of a tree, of a model that gets its sequences one by one."""
    losses: dict[tuple[int, int], torch.Tensor] = {}
    for row in range(len(ids)):
        for leaf in TREE.leaves:
            path = TREE.sequence(leaf)
            logits = model(ids[row : row + 1, path]).logits[0, :-1].float()
            each = torch.nn.functional.cross_entropy(logits, labels[row, path[1:]], reduction="none")
            losses |= {(row, token): loss for token, loss in zip(path[1:].tolist(), each, strict=True)}
    return torch.stack([loss for place, loss in losses.items() if labels[place] != -100]).mean()


def test_a_tree_is_its_sequences_one_by_one() -> None:
    model, labels = model_of("llama"), tokens(128)
    labels[0, :35] = -100
    one = train(model, {}, lambda: SimpleNamespace(loss=average_sequences(model, tokens(128), labels)))

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        model.gradient_checkpointing_enable()
        return compare(model, huggingface.shard_tree(cp, tokens(128), TREE, labels), one)

    assert max(run_on_ranks(rank, "needed", 4)) <= 1e-5


def test_a_model_that_cannot_take_a_tree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, forgets, model = (model_of(kind) for kind in ("gemma3_text", "llama", "llama"))

    def rank(cp: ContextParallel) -> None:
        for each in (windows, forgets, model):
            huggingface.apply(each, cp)
        batch = huggingface.shard_tree(cp, tokens(128), TREE)
        with pytest.raises(ValueError, match=r"must be \[b, 128\], the tokens of the tree, got \[2, 64\]"):
            huggingface.shard_tree(cp, tokens(64), TREE)
        with pytest.raises(ValueError, match="tree cannot be combined with a window"):
            windows(**batch)
        with pytest.raises(ValueError, match="position_ids must be those"):
            model(**batch | {"tree": Tree((100, 28))})
        with pytest.raises(ValueError, match="position_ids must be those"):
            model(**{key: y for key, y in batch.items() if key != "tree"})
        model(**batch)
        inner = forgets.model.forward
        forgets.model.forward = lambda *args, tree=None, **named: inner(*args, **named)
        with pytest.raises(ValueError, match="does not pass `tree` on to its attention"):
            forgets(**batch)
        monkeypatch.setattr(type(model), "forward", lambda self, **named: None)
        with pytest.raises(ValueError, match="takes no logits_to_keep"):
            model(**batch)

    run_on_ranks(rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_input_is_refused_and_undoing_it_generates(dtype: torch.dtype) -> None:
    model = model_of("llama", dtype)

    def rank(cp: ContextParallel) -> None:
        huggingface.apply(model, cp)
        batch, whole = huggingface.shard(cp, tokens(128)), {"input_ids": tokens(128)}
        seen = torch.ones_like(batch["input_ids"])
        padded = seen.masked_fill(torch.arange(32) < torch.tensor([[1], [0]]), 0)
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("position_ids must be those", whole),
            ("position_ids must be those", whole | {"position_ids": torch.arange(128)[None]}),
            ("labels would be shifted", batch | {"shift_labels": None}),
            ("label_smoothing_factor=0", batch | {"labels": None}),  # as by Trainer's label smoother
            ("does not support padding", batch | {"attention_mask": padded}),
            ("does not support a custom mask", batch | {"attention_mask": torch.zeros(2, 1, 32, 32, dtype=dtype)}),
        ]
        for message, arguments in wrong:
            with pytest.raises(ValueError, match=message):
                model(**arguments)
        with pytest.raises(ValueError, match="position_ids must be those"):
            model.generate(tokens(128), max_new_tokens=2)
        model(**batch, attention_mask=seen)
        model.set_attn_implementation("sdpa")
        assert model.generate(tokens(128), max_new_tokens=2, do_sample=False).shape == (2, 130)

    run_on_ranks(rank, "striped", 4)


def test_it_says_once_that_gradients_are_summed(capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of("llama")

    def rank(cp: ContextParallel) -> None:
        for _ in range(2):
            huggingface.apply(model, cp, check=False)

    run_on_ranks(rank, "striped")
    printed = capfd.readouterr().out
    assert printed.count("DistributedDataParallel and FSDP average them: there, call (loss * 2).backward()") == 1


def test_finetuning_a_model_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``examples/finetune.py`` on a directory: a model and its tokenizer."""
    model_of("llama", vocab_size=256).save_pretrained(tmp_path)
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "finetune.py"))
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--model", str(tmp_path), "--steps", "4", "--seq-length", "64"])
    run_ranks(example["main"], 4, args=(example["arguments"](),))


def test_a_model_is_as_before_if_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may catch the error: its model must not take whole batches for shards."""
    model = model_of("llama")
    before = model.config._attn_implementation

    def fails(*args: Any, **named: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(ContextParallel, "attention", fails)
    with pytest.raises(MemoryError, match="planted"):
        huggingface.apply(model, ContextParallel("ring"))
    assert model.config._attn_implementation == before and not model._forward_pre_hooks
