"""Probes of contracts: Megatron's function and its replacement, on a few numbers; they say what differs.

Every probe computes where both must agree: on one rank, or on two in Megatron's own layout (``stock``). A probe says
nothing about other layouts; those the start-up self-check compares with one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cp_plugin.megatron import compat
from cp_plugin.megatron.patches import patching, stock
from cp_plugin.megatron.patches.probing import (
    TOKENS,
    accepted,
    config,
    difference,
    first_difference,
    numbers,
    whole,
    zigzag,
)

_RANKS = 2


def batch(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``get_batch_on_this_cp_rank``: what each rank keeps."""

    def made() -> dict[str, Any]:
        row = torch.arange(TOKENS, device=stock.device()).unsqueeze(0)
        entries = {name: row + 100 * i for i, name in enumerate(("tokens", "labels", "loss_mask", "position_ids"))}
        mask = torch.arange(TOKENS**2, device=stock.device()).view(1, 1, TOKENS, TOKENS)
        none = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")
        return entries | {"attention_mask": mask} | dict.fromkeys(none)

    for number in range(_RANKS):
        with stock.rank(number, _RANKS) as group:
            flags = accepted(original, cp_group=group, is_hybrid_cp=False)
            want, got = original(made(), **flags), replacement(made(), **flags)
        if found := first_difference(want, got):
            return f"on rank {number} of {_RANKS}, {found}"
    return None


def packed_batch(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``get_thd_batch_on_this_cp_rank``: on one rank it leaves the batch as it is, and describes its documents."""
    row = torch.arange(TOKENS, device=stock.device()).unsqueeze(0)
    bounds, longest = (torch.tensor(x, dtype=torch.int32, device=row.device) for x in ([0, 5, TOKENS], [11]))
    batch, packed = original({"tokens": row}, bounds, bounds, longest, cp_size=1, cp_rank=0)
    return difference("the tokens of one rank", row, batch["tokens"]) or difference(
        "the bounds of documents", bounds, packed.cu_seqlens_q_padded
    )


def rope(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``get_pos_emb_on_this_cp_rank``: which rows of a table each rank keeps."""
    for number in range(_RANKS):
        for dim in (0, 1):
            table = torch.arange(4 * TOKENS, device=stock.device()).view(*((TOKENS, 4) if dim == 0 else (4, TOKENS)))
            with stock.rank(number, _RANKS) as group:
                arguments = {"pos_emb": table, "seq_dim": dim, "cp_group": group}
                want, got = original(**arguments), replacement(**arguments)
            if found := difference("rows", want, got):
                return f"on rank {number} of {_RANKS}, {found}"
    return None


def rope_of_packs(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``_apply_rotary_pos_emb_thd``: on one rank, and on two where a pack has one document only."""
    cases = [(1, 0, (0, 5, TOKENS)), *((_RANKS, number, (0, TOKENS)) for number in range(_RANKS))]
    names = inspect.signature(original).parameters
    latent = "mla_rotary_interleaved" if "mla_rotary_interleaved" in names else "multi_latent_attention"  # before 0.19
    for size, number, bounds in cases:
        t = numbers(TOKENS // size, 2, 8)
        longest = max(b - a for a, b in pairwise(bounds))
        for rows, more in (
            (longest, {}),
            (TOKENS, {}),
            (longest, {"rotary_interleaved": True}),
            (longest, {latent: True}),
            (longest, {"mscale": 2.0}),
        ):
            freqs = numbers(rows, 1, 1, 8)
            arguments = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "freqs": freqs, **more}
            with stock.rank(number, size) as group:
                flags = accepted(original, cp_group=group, max_seqlen=longest)
                want, got = original(t.clone(), **arguments, **flags), replacement(t.clone(), **arguments, **flags)
            if found := difference("rotated queries", want, got):
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

    x = torch.arange(1, TOKENS + 1).unsqueeze(0)
    ends = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    for packed, of in ((None, ""), (pack, " of packed documents")):
        want, total = compat.roll(original, x.clone(), stock.Group(), packed)
        parts = stock.on_ranks(
            lambda group, packed=packed: compat.roll(replacement, zigzag(x, group), group, packed), _RANKS
        )
        if found := difference(f"the next tokens{of}", want, whole([part for part, _ in parts])):
            return found
        if found := difference(f"the sum of the next tokens{of}", total, sum(part for _, part in parts)):
            return found
    return None


def mtp_loss(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``process_mtp_loss``: the gradients of two ranks, averaged or summed as Megatron does, are those of one."""
    from megatron.core.transformer import multi_token_prediction

    from cp_plugin.megatron.patches import mtp

    roll_tensor = patching.original("megatron.core.transformer.multi_token_prediction:roll_tensor")
    labels = torch.arange(1, TOKENS + 1).unsqueeze(0)
    mask = torch.ones(1, TOKENS)
    mask[:, 2:5] = 0  # unevenly on the ranks
    hidden = numbers(3, TOKENS, 1, 1)

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
            config=config(mtp_num_layers=2, calculate_per_token_loss=per_token),
            **accepted(original, cp_group=group, packed_seq_params=None),
        )
        (found,) = torch.autograd.grad(out.sum(), leaf)
        return found.view(3, -1)

    for per_token in (False, True):
        want = gradient(original, per_token, stock.Group(), lambda x, dim: x)
        with patching.lent(multi_token_prediction, roll_tensor=mtp.replace_roll_tensor(roll_tensor)):
            parts = stock.on_ranks(
                lambda group, per_token=per_token: gradient(
                    replacement, per_token, group, lambda x, dim: zigzag(x, group, dim)
                ),
                _RANKS,
            )
        got = whole(parts) / (1 if per_token else _RANKS)
        of = "with --calculate-per-token-loss" if per_token else "without --calculate-per-token-loss"
        # the main loss's own gradient is on every rank, however many there are
        if found := difference(f"gradients of the predicted tokens {of}", want[1:], got[1:]):
            return found
    return None


def calc_loss(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``forward_step_calc_loss``: by what the losses of a rank are divided, and those of experts and of prediction.

    A rank's sum is divided by its tokens and the micro-batches, or by nothing; a mean is multiplied by the ranks.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    total, tokens, batches = 12.0, 3, 2
    scalers = {"experts": MoEAuxLossAutoScaler, "multi-token prediction": MTPLossAutoScaler}

    def scales(per_token: bool, *parts: float) -> tuple[Tensor, dict[str, Tensor]]:
        settings = config(calculate_per_token_loss=per_token)
        settings.num_moe_experts, settings.mtp_num_layers = 2, 1
        given = {
            "model": torch.nn.Module(),
            "output_tensor": torch.zeros(1),
            "loss_func": lambda _: (*(torch.tensor(part) for part in parts), {}),
            "config": settings,
            "vp_stage": None,
            "collect_non_loss_data": False,
            "num_microbatches": batches,
            "forward_data_store": [],
        }
        with ExitStack() as back:
            for kind in scalers.values():
                back.enter_context(patching.lent(kind, main_loss_backward_scale=None))
            found = original(**given, **accepted(original, cp_group_size=_RANKS, is_last_stage=True))
            held = {name: torch.as_tensor(kind.main_loss_backward_scale) for name, kind in scalers.items()}
        return found[0] if isinstance(found, tuple) else found, held

    for per_token, want in ((False, total / tokens / batches), (True, total)):
        loss, held = scales(per_token, total, tokens)
        of_others = (1.0, 1.0) if per_token else (_RANKS / batches, 1 / batches)
        if found := difference("the loss of a micro-batch", torch.tensor(want), loss):
            return found
        for (name, scale), wanted in zip(held.items(), of_others, strict=True):
            if found := difference(f"the scale of the losses of {name}", torch.tensor(wanted), scale.squeeze()):
                return found
    loss, _ = scales(False, total)
    return difference("the loss of two parts of a micro-batch", torch.tensor(total * _RANKS / batches), loss)


def token_counts(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``get_tokens_per_expert_and_token_count``: tokens of each expert, of a rank in the mean, of all ranks.

    Two ranks with the same tokens; the sum over them is made in place, as Megatron's.
    """
    from megatron.core.transformer.moe import moe_utils

    routed = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 0]])  # the last token is padding
    with patching.lent(moe_utils, reduce_from_tensor_model_parallel_region=lambda x, group: x.mul_(group.size())):
        found = replacement(routed, stock.Group(0, _RANKS), topk=1, with_padding_mask=True)
    if len(found) != 3:
        return f"it returns {len(found)} values, not 3"
    names = ("tokens of each expert", "a rank's tokens", "all ranks' tokens")
    pairs = zip(names, (torch.tensor([4.0, 2.0]), torch.tensor(3.0), torch.tensor(6.0)), found, strict=True)
    return next((x for name, want, got in pairs if (x := difference(name, want, torch.as_tensor(got).float()))), None)


def order_of_states(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``_undo_attention_load_balancing`` and ``_redo_...``: rows of two ranks in token order, or back."""
    x = torch.arange(TOKENS)
    arguments = (x, _RANKS, None)
    with stock.rank(0, _RANKS):
        return difference("the order of tokens", original(*arguments), replacement(*arguments))


def order_of_packs(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """``_build_thd_cp_a2a_perm``: both orders of a pack of one document."""
    arguments = {"cu_seqlens": torch.tensor([0, TOKENS]), "cp_size": _RANKS, "t_global": TOKENS}
    with stock.rank(0, _RANKS):
        pairs = zip(original(**arguments), replacement(**arguments), strict=True)
    return next((x for want, got in pairs if (x := difference("the order of tokens", want, got))), None)


def bounds_of_packs(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> str | None:
    """``_resolve_cu_seqlens``: padded bounds if there are any."""
    plain, padded = torch.tensor([0, 4, TOKENS]), torch.tensor([0, 8, TOKENS])
    for given in ((None, plain), (padded, plain)):
        arguments = (None, *given, TOKENS, "cu_seqlens")
        if found := difference("the bounds of documents", original(*arguments), replacement(*arguments)):
            return found
    return None
