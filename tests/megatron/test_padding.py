"""Sequences and packs that the layout cannot divide (``--cp-pad-sequence``): parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_slicing import one_rank_of

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.core import layout as layouts
from cp_plugin.megatron.flags.args import Settings

pytestmark = pytest.mark.usefixtures("adapter")


def _one_of(layout: str, index: int) -> ContextParallel:
    return one_rank_of("striped" if layout == "striped" else "ring", layout, 4, index)


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``padding(tokens, padded, experts=False)``: a run with ``--cp-pad-sequence`` and such sequences."""
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.state import Model

    def begin(tokens: int, padded: int, **more: Any) -> None:
        problem = Problem(size=4, heads=4, kv_heads=4, seq_length=padded)
        model = Model(problem=problem, resolved={}, padding=padded - tokens, **more)
        runtime.configure(Settings(provider="ring", pad_sequence=True, options=Options()), model)

    return begin


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_every_entry_of_a_batch_is_padded(padding: Callable[..., None], layout: str) -> None:
    from cp_plugin.megatron.patches.batch import pad_batch

    padding(9, 16)
    whole = torch.arange(1, 10).expand(2, 9)
    batch = {
        "tokens": whole,
        "labels": whole,
        "loss_mask": whole.float(),
        "position_ids": whole.expand(3, 2, 9),
        "attention_mask": torch.zeros(2, 1, 9, 9, dtype=torch.bool),
        "cu_seqlens": torch.tensor([[0, 4, 9]]),
        "max_seqlen": None,
        "dataset_id": torch.tensor([7, 8]),
    }
    found = pad_batch(dict(batch), _one_of(layout, 1))
    length = 16 if layout == "zigzag" else 12
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert found[key].size(-1) == length and torch.equal(found[key][..., :9], batch[key])
        assert found[key].dtype == batch[key].dtype and not found[key][..., 9:].any()
    mask = found["attention_mask"]
    assert mask.shape == (2, 1, length, length) and mask[..., 9:].all() and mask[..., 9:, :].all()
    for key in ("cu_seqlens", "max_seqlen", "dataset_id"):
        assert found[key] is batch[key]


@pytest.mark.parametrize(
    ("batch", "more", "said"),
    [
        ({"labels": 9}, {}, "the batch has labels and no loss_mask, so padding would count"),
        ({"tokens": 9, "features": 9}, {}, "the batch has 'features' of 9 tokens, which the plugin cannot pad"),
        ({"tokens": 10}, {"experts": True}, "the batch has 10 tokens instead of the 9 of --seq-length, so routers"),
    ],
)
def test_unpaddable_batches_are_refused(
    padding: Callable[..., None], batch: Mapping[str, int], more: Mapping[str, Any], said: str
) -> None:
    from cp_plugin.megatron.patches.batch import pad_batch

    padding(9, 12, **more)
    with pytest.raises(ValueError, match=f"--cp-pad-sequence: {said}"):
        pad_batch({key: torch.zeros(2, tokens) for key, tokens in batch.items()}, _one_of("striped", 0))


def test_routers_are_told_which_tokens_are_padding(
    padding: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import padding as module

    router = module.replace_router_forward(lambda self, input, padding_mask=None: padding_mask)
    monkeypatch.setattr(module, "parallel_state", SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1))
    padding(9, 16, parts=2)
    for index, expected in enumerate(([0, 1], [1, 1], [1, 1], [1, 1])):  # tokens 8, 12; 9, 13; ...
        monkeypatch.setattr(runtime, "context_parallel", lambda index=index: _one_of("striped", index))
        assert router(None, torch.zeros(2, 3, 8)).tolist() == [3 * [bool(x)] for x in expected]
    theirs = torch.ones(2, 3)
    assert router(None, torch.zeros(2, 3, 8), theirs) is theirs
    with torch.no_grad():
        assert router(None, torch.zeros(5, 3, 8)) is None, "it balances nothing"
    with pytest.raises(ValueError, match="a router has 24 tokens on all ranks, but --seq-length has 9, padded"):
        router(None, torch.zeros(3, 3, 8))
