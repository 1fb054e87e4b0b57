"""Probes of contracts: Megatron's function and its replacement, on a few numbers; they say what differs.

Every probe computes where both must agree: on one rank, or on two in Megatron's own layout (``stock``). A probe says
nothing about other layouts; those the start-up self-check compares with one rank.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cp_plugin.megatron.patches import patching, stock

_RANKS = 2
_TOKENS = 16


def batch(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``get_batch_on_this_cp_rank``: what each rank keeps."""

    def made() -> dict[str, Any]:
        row = torch.arange(_TOKENS).unsqueeze(0)
        entries = {name: row + 100 * i for i, name in enumerate(("tokens", "labels", "loss_mask", "position_ids"))}
        mask = torch.arange(_TOKENS**2).view(1, 1, _TOKENS, _TOKENS)
        none = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")
        return entries | {"attention_mask": mask} | dict.fromkeys(none)

    for number in range(_RANKS):
        with stock.rank(number, _RANKS) as group:
            flags = _accepted(original, cp_group=group, is_hybrid_cp=False)
            want, got = original(made(), **flags), replacement(made(), **flags)
        if found := _first_difference(want, got):
            return f"on rank {number} of {_RANKS}, {found}"
    return None


def packed_batch(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``get_thd_batch_on_this_cp_rank``: on one rank it leaves the batch as it is, and describes its documents."""
    row, bounds = torch.arange(_TOKENS).unsqueeze(0), torch.tensor([0, 5, _TOKENS], dtype=torch.int32)
    batch, packed = original({"tokens": row}, bounds, bounds, torch.tensor([11]), cp_size=1, cp_rank=0)
    return _difference("the tokens of one rank", row, batch["tokens"]) or _difference(
        "the bounds of documents", bounds, packed.cu_seqlens_q_padded
    )


def rope(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``get_pos_emb_on_this_cp_rank``: which rows of a table each rank keeps."""
    for number in range(_RANKS):
        for dim in (0, 1):
            table = torch.arange(4 * _TOKENS, device=stock.device()).view(*((_TOKENS, 4) if dim == 0 else (4, _TOKENS)))
            with stock.rank(number, _RANKS) as group:
                arguments = {"pos_emb": table, "seq_dim": dim, "cp_group": group}
                want, got = original(**arguments), replacement(**arguments)
            if found := _difference("rows", want, got):
                return f"on rank {number} of {_RANKS}, {found}"
    return None


def rope_of_packs(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``_apply_rotary_pos_emb_thd``: on one rank, and on two where a pack has one document only."""
    cases = [(1, 0, (0, 5, _TOKENS)), *((_RANKS, number, (0, _TOKENS)) for number in range(_RANKS))]
    for size, number, bounds in cases:
        t = _numbers(_TOKENS // size, 2, 8)
        longest = max(b - a for a, b in pairwise(bounds))
        for rows, more in (
            (longest, {}),
            (_TOKENS, {}),
            (longest, {"rotary_interleaved": True}),
            (longest, {"mscale": 2.0}),
        ):
            freqs = _numbers(rows, 1, 1, 8)
            arguments = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "freqs": freqs, **more}
            with stock.rank(number, size) as group:
                flags = _accepted(original, cp_group=group, max_seqlen=longest)
                want, got = original(t.clone(), **arguments, **flags), replacement(t.clone(), **arguments, **flags)
            if found := _difference("rotated queries", want, got):
                return f"on rank {number} of {size}, documents {bounds}, {found}"
    return None


def yarn_table(original: Callable[..., None], replacement: Callable[..., None]) -> str | None:
    """``YarnRotaryEmbedding``: nothing but MLA's fused rotation reads the table that the replacement does not make."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for name in ("forward", "get_emb"):
        method = vars(YarnRotaryEmbedding).get(name)
        if method is not None:
            code = inspect.unwrap(method).__code__
            if {"cos_cached", "sin_cached"} & {*code.co_names}:
                return f"{code.co_qualname} reads the table of angles"
    return None


def roll(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``roll_tensor``: the next tokens of a sequence and of packed documents, and their sum."""
    from megatron.core.packed_seq_params import PackedSeqParams

    x = torch.arange(1, _TOKENS + 1).unsqueeze(0)
    ends = torch.tensor([0, 5, _TOKENS], dtype=torch.int32)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    whole = {"shifts": -1, "dims": -1}
    want, total = original(x.clone(), **whole, cp_group=stock.Group(), packed_seq_params=None)
    parts = stock.on_ranks(
        lambda group: replacement(_zigzag(x, group), **whole, cp_group=group, packed_seq_params=None), _RANKS
    )
    if found := _difference("the next tokens", want, _whole([part for part, _ in parts])):
        return found
    if found := _difference("their sum", total, sum(part for _, part in parts)):
        return found
    want, _ = original(x.clone(), **whole, cp_group=stock.Group(), packed_seq_params=pack)
    parts = stock.on_ranks(
        lambda group: replacement(_zigzag(x, group), **whole, cp_group=group, packed_seq_params=pack), _RANKS
    )
    return _difference("the next tokens of packed documents", want, _whole([part for part, _ in parts]))


def mtp_loss(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``process_mtp_loss``: the gradients of two ranks, averaged or summed as Megatron does, are those of one."""
    from megatron.core.transformer import multi_token_prediction

    from cp_plugin.megatron.patches import mtp

    roll_tensor = patching.original("megatron.core.transformer.multi_token_prediction:roll_tensor")
    labels = torch.arange(1, _TOKENS + 1).unsqueeze(0)
    mask = torch.ones(1, _TOKENS)
    mask[:, 2:5] = 0  # unevenly on the ranks
    hidden = _numbers(3, _TOKENS, 1, 1)

    def gradient(
        call: Callable[..., Tensor], per_token: bool, group: stock.Group, cut: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        leaf = torch.cat([cut(part, 0) for part in hidden]).requires_grad_()
        out = call(
            hidden_states=leaf,
            labels=cut(labels, 1),
            loss_mask=cut(mask, 1),
            output_layer=lambda h, **_: (h, None),
            output_weight=torch.ones(1),
            runtime_gather_output=None,
            is_training=False,
            compute_language_model_loss=lambda of, logits: of * logits[..., 0].transpose(0, 1),
            config=_config(mtp_num_layers=2, calculate_per_token_loss=per_token),
            **_accepted(original, cp_group=group, packed_seq_params=None),
        )
        (found,) = torch.autograd.grad(out.sum(), leaf)
        return found.view(3, -1)

    for per_token in (False, True):
        want = gradient(original, per_token, stock.Group(), lambda x, dim: x)
        back = patching.lend(multi_token_prediction, "roll_tensor", mtp.replace_roll_tensor(roll_tensor))
        try:
            parts = stock.on_ranks(
                lambda group, per_token=per_token: gradient(
                    replacement, per_token, group, lambda x, dim: _zigzag(x, group, dim)
                ),
                _RANKS,
            )
        finally:
            back()
        got = _whole(parts) / (1 if per_token else _RANKS)
        of = "with --calculate-per-token-loss" if per_token else "without --calculate-per-token-loss"
        # the main loss's own gradient is on every rank, however many there are
        if found := _difference(f"gradients of the predicted tokens {of}", want[1:], got[1:]):
            return found
    return None


def calc_loss(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``forward_step_calc_loss``: a rank's sum is divided by its tokens and the micro-batches, or by nothing."""
    total, tokens, batches = 12.0, 3, 2
    for per_token, want in ((False, total / tokens / batches), (True, total)):
        given = {
            "model": torch.nn.Module(),
            "output_tensor": torch.zeros(1),
            "loss_func": lambda _: (torch.tensor(total), torch.tensor(tokens), {}),
            "config": _config(calculate_per_token_loss=per_token),
            "vp_stage": None,
            "collect_non_loss_data": False,
            "num_microbatches": batches,
            "forward_data_store": [],
        }
        found = original(**given, **_accepted(original, cp_group_size=_RANKS, is_last_stage=True))
        loss = found[0] if isinstance(found, tuple) else found
        if found := _difference("the loss of a micro-batch", torch.tensor(want), loss):
            return found
    return None


def token_counts(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``get_tokens_per_expert_and_token_count``: tokens of each expert, of this rank, of all ranks."""
    from megatron.core.transformer.moe import moe_utils

    routed = torch.tensor([[1, 0], [1, 0], [0, 1]])
    back = patching.lend(moe_utils, "reduce_from_tensor_model_parallel_region", lambda x, group: x)
    try:
        found = original(routed, stock.Group(), topk=1, with_padding_mask=True)
    finally:
        back()
    if len(found) != 3:
        return f"it returns {len(found)} values, not 3"
    names = ("tokens of each expert", "this rank's tokens", "all ranks' tokens")
    pairs = zip(names, (torch.tensor([2, 1]), torch.tensor(3), torch.tensor(3)), found, strict=True)
    return next((x for name, want, got in pairs if (x := _difference(name, want, torch.as_tensor(got)))), None)


def order_of_states(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``_undo_attention_load_balancing`` and ``_redo_...``: rows of two ranks in token order, or back."""
    x = torch.arange(_TOKENS)
    arguments = (x, _RANKS, None)
    with stock.rank(0, _RANKS):
        return _difference("the order of tokens", original(*arguments), replacement(*arguments))


def order_of_packs(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``_build_thd_cp_a2a_perm``: both orders of a pack of one document."""
    arguments = {"cu_seqlens": torch.tensor([0, _TOKENS]), "cp_size": _RANKS, "t_global": _TOKENS}
    with stock.rank(0, _RANKS):
        pairs = zip(original(**arguments), replacement(**arguments), strict=True)
    return next((x for want, got in pairs if (x := _difference("the order of tokens", want, got))), None)


def bounds_of_packs(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``_resolve_cu_seqlens``: padded bounds if there are any."""
    plain, padded = torch.tensor([0, 4, _TOKENS]), torch.tensor([0, 8, _TOKENS])
    for given in ((None, plain), (padded, plain)):
        arguments = (None, *given, _TOKENS, "cu_seqlens")
        if found := _difference("the bounds of documents", original(*arguments), replacement(*arguments)):
            return found
    return None


def core_attention(original: Callable[..., type], replacement: Callable[..., type]) -> str | None:
    """``LocalSpecProvider.core_attention``: the attention that it names computes what the plugin's does on one rank."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_plugin.megatron.layers.core_attention import CoreAttention

    groups = SimpleNamespace(tp=stock.Group(), cp=stock.Group())
    q, k, v = (_numbers(_TOKENS, 1, heads, 8).to(stock.device()) for heads in (4, 2, 2))
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=stock.device()).triu(1)[None, None]
    cases: tuple[tuple[dict[str, Any], float | None], ...] = (
        ({}, None),
        ({}, 0.1),
        ({"window_size": (5, 0)}, None),
        ({"softmax_type": "off-by-one"}, None),
    )
    for settings, scale in cases:
        config = _config(**settings)
        config.sequence_parallel = True  # otherwise dropout, of nothing here, asks for generators that nobody has made
        given = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
        given |= {"softmax_scale": scale, "pg_collection": groups}
        with stock.alone(), torch.no_grad(), _buffers():
            outs = [
                kind(config, **given).to(stock.device())(*(x.clone() for x in (q, k, v)), attention_mask=mask)
                for kind, mask in ((original(None), hidden), (CoreAttention, None))
            ]
        what = ", ".join(f"{name} {value}" for name, value in settings.items()) or "causal attention"
        if found := _difference(
            f"{what}{'' if scale is None else f', softmax_scale {scale}'}: the output", *outs, limit=1e-4
        ):
            return found
    return None


@contextmanager
def _buffers() -> Iterator[None]:
    """Megatron's memory for scores, which it makes with its process groups."""
    from megatron.core import parallel_state
    from megatron.core.utils import GlobalMemoryBuffer

    back = patching.lend(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    try:
        yield
    finally:
        back()


class _Handed(Exception):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments


def te_attention(original: Callable[..., type], replacement: Callable[..., type]) -> str | None:
    """``TESpecProvider.core_attention``: what its class hands to Transformer Engine is what the plugin's computes."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.transformer.enums import AttnMaskType

    kind = original(None)
    if not (isinstance(kind, type) and vars(extension).get("HAVE_TE")):
        return None  # no such class without Transformer Engine

    def hand(self: Any, *_: Any, **named: Any) -> None:
        raise _Handed(named)

    given = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self", "softmax_scale": 0.3}
    groups = SimpleNamespace(tp=stock.Group(), cp=stock.Group(), hcp=None)
    back = patching.lend(extension.te.pytorch.DotProductAttention, "__init__", hand)
    try:
        kind(_config(window_size=(5, 0), softmax_type="learnable"), **given, pg_collection=groups)
    except _Handed as handed:
        want = {"num_attention_heads": 4, "kv_channels": 8, "num_gqa_groups": 2, "softmax_scale": 0.3}
        want |= {"attention_dropout": 0.0, "window_size": (5, 0), "softmax_type": "learnable"}
        got = handed.arguments
        wrong = [f"{name} {got.get(name)!r}, not {x!r}" for name, x in want.items() if got.get(name) != x]
        return f"Transformer Engine's attention gets {', '.join(wrong)}" if wrong else None
    finally:
        back()
    return "it does not build Transformer Engine's attention"


def _accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that this version of a function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "masked_softmax_fusion": False}
    with warnings.catch_warnings(action="ignore"):  # about defaults of Megatron's own
        return TransformerConfig(**sizes, **plain, **settings)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _zigzag(x: Tensor, group: stock.Group, dim: int = 1) -> Tensor:
    """A rank's chunks of a whole sequence."""
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat((chunks[group.rank()], chunks[2 * group.size() - 1 - group.rank()]), dim)


def _whole(parts: list[Tensor]) -> Tensor:
    """The inverse of ``_zigzag``, along dimension 1."""
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([half for half, _ in halves] + [half for _, half in reversed(halves)], 1)


def _first_difference(want: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    if want.keys() != got.keys():
        return f"the entries are {sorted(want)}, and {sorted(got)} by cp_plugin"
    named = ((name, want[name], got[name]) for name in want if isinstance(want[name], Tensor))
    return next((found for each in named if (found := _difference(*each))), None)


def _difference(name: str, want: Tensor, got: Any, limit: float = 1e-6) -> str | None:
    """What differs, with the first values of both; None: nothing beyond rounding."""
    want, got = want.detach().cpu(), torch.as_tensor(got).detach().cpu()
    if want.shape == got.shape and torch.allclose(want.double(), got.double(), rtol=limit, atol=limit):
        return None
    here, there = (x.flatten()[:8].tolist() for x in (want, got))
    return f"{name}: {here} of {list(want.shape)} by this Megatron, {there} of {list(got.shape)} by cp_plugin"
