"""Slicing and padding of batches: entries that no training has, other versions' signatures, and refusals.

``cases.toml`` trains on slices in every layout, and on padded ones.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import TraceMesh
from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.state import Model

TOKENS = 16
ActAs = Callable[[ContextParallel], list[Any]]


def one_rank_of(name: str, layout: str, size: int, index: int, **options: Any) -> ContextParallel:
    problem = Problem(size=size, heads=4, kv_heads=4)
    settled = providers.settle(name, problem, Options(layout=layout, **options))
    axes = settled.axes
    return ContextParallel(name, mesh=TraceMesh(axes, index), problem=problem, layout=layout, **options)


def _batch() -> dict[str, Any]:
    whole = torch.arange(2 * TOKENS).view(2, TOKENS)
    return {
        "tokens": whole,
        "labels": whole + 1,
        "loss_mask": whole.float(),
        "position_ids": torch.arange(TOKENS).expand(2, TOKENS),
        "attention_mask": torch.arange(TOKENS * TOKENS).view(1, 1, TOKENS, TOKENS),
        "hidden": torch.randn(2, TOKENS, 3),
        "cu_seqlens": None,
        "max_seqlen": None,
        "local_cp_size": torch.tensor(1),
        "dataset_id": torch.tensor([7, 8]),
        "source": "somewhere",
    }


def _plain(batch, cp_group=None):
    """Parameters of the first ``get_batch_on_this_cp_rank``."""


def _newest(
    batch,
    is_hybrid_cp,
    cp_group=None,
    hybrid_cp_group_func=None,
    use_per_sequence_balancing=False,
    use_contiguous_cp=False,
):
    """Those with Megatron's layout manager."""


def replace_get_batch(original: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    from cp_plugin.megatron.patches import batch

    return batch.replace_get_batch(original)


@pytest.fixture
def act_as(adapter: None, monkeypatch: pytest.MonkeyPatch) -> ActAs:
    """Make this process one rank; the returned list collects the groups it was asked for."""
    from cp_plugin.megatron import runtime

    groups: list[Any] = []

    def be(cp: ContextParallel) -> list[Any]:
        monkeypatch.setattr(runtime, "context_parallel", lambda group=None: (groups.append(group), cp)[1])
        return groups

    return be


AT = {"contiguous": [4, 5, 6, 7], "zigzag": [2, 3, 12, 13], "striped": [1, 5, 9, 13]}
"""Of 16 tokens, those of the second of four ranks."""


@pytest.mark.parametrize("layout", AT)
def test_what_else_a_batch_has(act_as: ActAs, layout: str) -> None:
    """That tokens, labels, loss mask and positions are cut to every provider's layouts, training runs show."""
    groups = act_as(one_rank_of("all_gather", layout, 4, 1))
    batch, whole = _batch(), _batch()
    whole["hidden"] = batch["hidden"]
    assert replace_get_batch(_plain)(batch, cp_group="group") is batch and groups[-1] == "group"
    assert torch.equal(batch["attention_mask"], whole["attention_mask"][:, :, AT[layout]])
    for key in ("tokens", "hidden"):
        assert torch.equal(batch[key], whole[key][:, AT[layout]])
    for key in ("cu_seqlens", "max_seqlen", "source", "local_cp_size", "dataset_id"):
        assert batch[key] is whole[key] or torch.equal(batch[key], whole[key])


def test_contiguous_tokens_that_a_script_asks_for(act_as: ActAs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where the model has others, unless Megatron converts them: then a mask's rows follow attention's."""
    from cp_plugin.megatron import runtime

    slicer = replace_get_batch(_newest)
    act_as(one_rank_of("striped", "striped", 4, 1))
    with pytest.raises(ValueError, match="use_contiguous_cp=True, but this model computes in the striped layout"):
        slicer(_batch(), is_hybrid_cp=False, use_contiguous_cp=True)
    act_as(one_rank_of("ring", "contiguous", 4, 1))
    batch = slicer(_batch(), is_hybrid_cp=False, use_contiguous_cp=True)
    assert batch["position_ids"][0].tolist() == AT["contiguous"]
    monkeypatch.setattr(runtime, "converted", lambda: True)
    act_as(one_rank_of("ring", "zigzag", 4, 1))
    batch = slicer(_batch(), is_hybrid_cp=False, use_contiguous_cp=True)
    assert batch["position_ids"][0].tolist() == AT["contiguous"]
    assert torch.equal(batch["attention_mask"], _batch()["attention_mask"][:, :, AT["zigzag"]])


def _slice_layouts(
    batch: dict[str, Any],
    boundary_layout: str,
    is_hybrid_cp: bool,
    cp_group: Any,
    additional_layouts: Iterable[str] = (),
    use_per_sequence_balancing: bool = False,
) -> SimpleNamespace:
    """``get_batches_on_this_cp_rank`` of Megatron-Core 0.20 (``megatron.core.context_parallel.utils``), for one layout.

    Nothing of that module is in a release that the tests install.
    """
    from megatron.core import utils

    assert not use_per_sequence_balancing and not list(additional_layouts), "left to Megatron"
    contiguous = boundary_layout == "contiguous"
    sliced = utils.get_batch_on_this_cp_rank(dict(batch), is_hybrid_cp, cp_group, use_contiguous_cp=contiguous)
    packed = None if sliced.get("cu_seqlens") is None else SimpleNamespace(cu_seqlens_q=sliced["cu_seqlens"].squeeze(0))
    return SimpleNamespace(
        boundary_layout=boundary_layout,
        batches_by_layout={boundary_layout: sliced},
        packed_seq_params_by_layout={boundary_layout: packed},
        get_packed_seq_params=lambda: packed,
    )


@pytest.fixture
def get_batches(adapter: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The function that newer scripts call, as the plugin replaces it."""
    from megatron.core import utils

    from cp_plugin.megatron.patches.batch import replace_get_batches

    monkeypatch.setattr(utils, "get_batch_on_this_cp_rank", replace_get_batch(_newest))
    replaced = replace_get_batches(_slice_layouts)
    return lambda batch, boundary, **more: replaced(batch, boundary, False, "group", **more)


CONVERTED = "ring, converted by Megatron"
ASKED: dict[tuple[str, str, tuple[str, ...]], str] = {
    ("striped", "zigzag", ()): "",  # which Megatron calls the layout of attention
    ("striped", "striped", ()): "",
    ("striped", "striped", ("zigzag", "contiguous", "striped")): "",
    (CONVERTED, "contiguous", ("zigzag",)): "",
    (CONVERTED, "zigzag", ()): r"in the zigzag layout, but .* the zigzag layout: request contiguous",
    ("striped", "contiguous", ()): r"in the contiguous layout, but .* in the striped layout: request striped or",
    ("striped", "zigzag", ("spiral",)): r"in the spiral layout, but .*: request contiguous or striped or zigzag",
}
"""Provider, layout of the boundary and others that a script asks for: why not."""


@pytest.mark.parametrize(("provider", "boundary", "others"), ASKED)
def test_a_batch_in_the_layouts_that_a_script_asks_for(
    act_as: ActAs,
    get_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    boundary: str,
    others: tuple[str, ...],
) -> None:
    """The boundary has the model's layout, unless Megatron converts; the script's own batch is as it was."""
    from cp_plugin.megatron import runtime

    monkeypatch.setattr(runtime, "converted", lambda: provider == CONVERTED)
    act_as(one_rank_of("ring", "zigzag", 4, 1) if provider == CONVERTED else one_rank_of(provider, provider, 4, 1))
    whole, said = _batch(), ASKED[provider, boundary, others]
    if said:
        with pytest.raises(ValueError, match=said):
            get_batches(whole, boundary, additional_layouts=others)
        return
    batches = get_batches(whole, boundary, additional_layouts=iter(others), use_per_sequence_balancing=True)
    assert batches.boundary_layout == boundary
    assert list(batches.batches_by_layout) == [boundary, *(layout for layout in others if layout != boundary)]
    for layout, batch in batches.batches_by_layout.items():
        own = provider if layout == boundary and provider != CONVERTED else layout
        assert batch["position_ids"][0].tolist() == AT[own]
        assert batches.packed_seq_params_by_layout[layout] is None
    assert torch.equal(whole["tokens"], _batch()["tokens"])


def test_a_pack_in_the_layouts_that_a_script_asks_for(act_as: ActAs, get_batches: Callable[..., Any]) -> None:
    """Its documents are not divided by themselves; ranks with a head axis, and one rank, have their own tokens."""
    pack = {"cu_seqlens": torch.tensor([[0, 3, TOKENS]], dtype=torch.int32), "max_seqlen": torch.tensor([13])}

    def positions(batch: dict[str, Any], boundary: str = "zigzag", **more: Any) -> list[list[int]]:
        by_layout = get_batches(batch, boundary, **more).batches_by_layout
        return [batch["position_ids"][0].tolist() for batch in by_layout.values()]

    act_as(one_rank_of("striped", "striped", 4, 1))
    assert positions(_batch() | pack) == [AT["striped"]]
    assert get_batches(_batch() | pack, "zigzag").get_packed_seq_params().cu_seqlens_q.tolist() == [0, 3, TOKENS]
    with pytest.raises(ValueError, match=r"packed documents in the layouts zigzag, contiguous, and .* request zigzag"):
        get_batches(_batch() | pack, "zigzag", additional_layouts=("contiguous",))
    act_as(one_rank_of("attention2d", "striped", 4, 1, head_parallel=2))
    assert positions(_batch()) == [list(range(2, TOKENS, 4))]
    with pytest.raises(ValueError, match=r"in the contiguous layout, but .*: request striped"):
        get_batches(_batch(), "zigzag", additional_layouts=("contiguous",))
    act_as(one_rank_of("ring", "zigzag", 1, 0))
    assert positions(_batch(), "contiguous", additional_layouts=("zigzag",)) == 2 * [list(range(TOKENS))]


def test_another_slicer_of_several_layouts_stops_the_run(adapter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron.patches import batch, patching
    from cp_plugin.megatron.patches.hooks import OF_RUN

    name = "megatron.core.context_parallel.utils"
    newer = ModuleType(name)
    newer.get_batches_on_this_cp_rank = lambda batch, layouts: {name: dict(batch) for name in layouts}
    monkeypatch.setitem(sys.modules, name, newer)
    (patch,) = [patch for patch in OF_RUN if patch is batch.replace_get_batches]
    with pytest.raises(ValueError, match="it has no parameter cp_group, boundary_layout, additional_layouts"):
        patching.install([patch])
    known = functools.partial(_slice_layouts)  # another object than this module's
    newer.get_batches_on_this_cp_rank = known
    patching.install([patch])
    assert newer.get_batches_on_this_cp_rank is not known
    patching.undo()
    assert newer.get_batches_on_this_cp_rank is known


def test_batches_that_are_refused_and_one_without_tokens(act_as: ActAs) -> None:
    act_as(one_rank_of("ring", "zigzag", 4, 1))
    with pytest.raises(ValueError, match="multiple of 8"):
        replace_get_batch(_plain)({"tokens": torch.zeros(1, 12)})
    with pytest.raises(ValueError, match="--hybrid-context-parallel is not supported by"):
        replace_get_batch(_newest)(_batch(), is_hybrid_cp=True)
    batch = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens"))
    assert replace_get_batch(_plain)(dict(batch)) == batch, "of a stage in the middle of a pipeline"


@pytest.fixture
def padding(act_as: ActAs) -> Callable[..., ContextParallel]:
    """``padding()``: one of four ranks of a run with ``--cp-pad-sequence`` and sequences of 9 tokens."""
    from cp_plugin.megatron import runtime

    def begin(**more: Any) -> ContextParallel:
        model = Model(problem=Problem(size=4, heads=4, kv_heads=4, seq_length=12), resolved={}, padding=3, **more)
        runtime.configure(Settings(provider="ring", pad_sequence=True), model)
        act_as(cp := one_rank_of("striped", "striped", 4, 0))
        return cp

    return begin


def test_a_mask_is_padded_on_both_sides(padding: Callable[..., ContextParallel]) -> None:
    """Trainings show it of the other entries: ``cases.toml`` (padded)."""
    from cp_plugin.megatron.patches.batch import pad_batch

    mask = pad_batch({"attention_mask": torch.zeros(2, 1, 9, 9, dtype=torch.bool)}, padding())["attention_mask"]
    assert mask.shape == (2, 1, 12, 12) and mask[..., 9:].all() and mask[..., 9:, :].all() and not mask[0, 0, 8, 8]


@pytest.mark.parametrize(
    ("batch", "more", "said"),
    [
        ({"labels": 9}, {}, "the batch has labels and no loss_mask, so padding would count"),
        ({"tokens": 9, "features": 9}, {}, "the batch has 'features' of 9 tokens, which the plugin cannot pad"),
        ({"tokens": 10}, {"experts": True}, "the batch has 10 tokens instead of the 9 of --seq-length, so routers"),
        ({}, {}, "a router has 24 tokens on all ranks, but --seq-length has 9, padded to 12"),
    ],
)
def test_what_cannot_be_padded_is_refused(
    padding: Callable[..., ContextParallel], batch: Mapping[str, int], more: Mapping[str, Any], said: str
) -> None:
    """Without a batch, a router is called."""
    from cp_plugin.megatron.patches.batch import pad_batch
    from cp_plugin.megatron.patches.padding import replace_router_forward

    cp = padding(**more)
    with pytest.raises(ValueError, match=f"--cp-pad-sequence: {said}"):
        if batch:
            pad_batch({key: torch.zeros(2, tokens) for key, tokens in batch.items()}, cp)
        replace_router_forward(lambda self, input, padding_mask=None: None)(SimpleNamespace(), torch.zeros(6, 3, 8))


def test_rope_needs_the_group_by_which_it_is_cut(act_as: ActAs) -> None:
    """That it is cut to the layout, every training run shows."""
    from cp_plugin.megatron.patches.rope import replace_get_pos_emb

    act_as(one_rank_of("ring", "zigzag", 4, 1))
    with pytest.raises(ValueError, match="cp_group must be provided"):
        replace_get_pos_emb(lambda pos_emb, seq_dim, cp_group: None)(torch.zeros(3, TOKENS, 1, 8), 1, None)
