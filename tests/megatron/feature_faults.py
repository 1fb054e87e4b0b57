"""Planted faults of Megatron's features, of scripts and of loss functions (``test_planted_faults``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fault_rows import Fault, Plant, instead, planted, replace_slicer, stock
from state_space_kernels import STATES
from torch import Tensor

from cp_plugin import ContextParallel

STEP = "differs from the step on one rank"
OUT = r"layer \d, head \d: out of \d+ of \d+ rows"
CP = "--context-parallel-size 2 --cp-provider"
STRIPED = f"{CP} striped"
ZIGZAG = f"{CP} ring --cp-layout zigzag"
CONTIGUOUS = f"{CP} ring --cp-layout contiguous"
PACKS = "--dataloader-inter-document-masking --calculate-per-token-loss"
FP8 = f"{STRIPED} --bf16 --cp-fp8 comm"
GLA = "--context-parallel-size 2 --cp-linear-attention gla --cp-layer-pattern LN"
DELTA_NET = f"{CP} ring --cp-linear-provider lasp2 --hybrid-layer-pattern G* {STATES} --seq-length 32"
PLACED = f"{CP} needed --cp-layout documents {PACKS}"
GPT = "cp_plugin.megatron.models.gpt"

# -- prediction, states and documents

MTP = "megatron.core.transformer.multi_token_prediction"
stock_roll = stock("stock_roll", f"{MTP}:roll_tensor")
REORDER = "megatron.core.ssm.mamba_context_parallel:_{}do_attention_load_balancing"
stock_order = stock("stock_order", REORDER.format("un"), REORDER.format("re"))


@instead(REORDER.format("un"))
def states_go_on(undo: Any, x: Tensor, size: int, packed: Any = None) -> Tensor:
    ordered = undo(x, size, packed)
    if packed is not None:
        packed.seq_idx = None
    return ordered


def unplaced(where: str, function: str) -> Plant:
    """One place ignores that the pack has a layout of its own."""

    def wrong(find: Any) -> Any:
        def forgetting(cp: ContextParallel, *pack: Any) -> Any:
            batch = find(cp, *pack)
            return replace(batch, cp=cp) if sys._getframe(1).f_code.co_name == function else batch

        return staticmethod(forgetting)

    return planted("cp_plugin.megatron.micro_batch:MicroBatch.find", f"unplaced {where}")(wrong)


@instead(f"{GPT}:_packed_seq_params")
def other_bounds_for_the_model(_: Any, batch: dict[str, Any]) -> Any:
    """The script slices by the documents' bounds, and gives the model those with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    wide = (batch["cu_seqlens"].squeeze(0) + 7) // 8 * 8
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=wide, cu_seqlens_kv=wide, max_seqlen_q=64, max_seqlen_kv=64)


no_documents = instead(f"{GPT}:_packed_seq_params", "no_documents")(lambda _, batch: None)


padding_counts = planted("cp_plugin.megatron.patches.batch:_BEHIND_THE_END", "padding_counts")(
    lambda values: values | {"loss_mask": 1}
)
gradients_as_states = instead("cp_plugin.engine.linear.scan:transposed", "gradients_as_states")(lambda _, x: x)


# -- linear and softmax layers, FP8

ATTENTION = "cp_plugin.engine.attention.api:ContextParallel"


def attend_in(layout: str, provider: str, kind: Any, owner: str) -> Plant:
    """Layers of a class compute in another layout than their tokens have."""

    def attention(_: Any) -> ContextParallel:
        from cp_plugin.megatron import runtime

        return ContextParallel(provider, mesh=runtime.context_parallel(kind=kind).mesh, layout=layout)

    name = f"{kind} attention in {layout}"
    return planted(f"cp_plugin.megatron.mixers.{owner}.context_parallel", name)(lambda _: property(attention))


wrong_decay_on_rank_1 = instead(f"{ATTENTION}.linear_attention", "wrong_decay_on_rank_1")(
    lambda attend, self, q, k, v, log_decay, **kwargs: attend(
        self, q, k, v, log_decay * (1.01 if dist.get_rank() == 1 else 1.0), **kwargs
    )
)


@instead("cp_plugin.engine.core.payload:pack")
def wrong_exponents(pack: Any, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    elements, exponents = pack(x, block)
    return elements, exponents.roll(1, 2) + 1


# -- scripts


def change_slices(change: Callable[[dict[str, Any]], None], name: str) -> Plant:
    def wrong(get: Any, *args: Any) -> dict[str, Any]:
        batch = get(*args)
        change(batch)
        return batch

    return instead(f"{GPT}:get_batch", name)(wrong)


def shift_labels(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"].roll(-1, 1)


def weigh_by_own_tokens(batch: dict[str, Tensor]) -> None:
    batch["loss_mask"] = batch["loss_mask"] / batch["loss_mask"].sum(1, keepdim=True).clamp(min=1)


def generated(batch: dict[str, Tensor]) -> None:
    shift_labels(batch)


generated.__module__ = None  # as of functions made by exec()


@instead(f"{GPT}:_slice")
def other_samples_on_a_rank(cut: Any, batch: dict[str, Tensor]) -> Any:
    from cp_plugin.megatron.state import STATE

    own = os.environ["RANK"] == "1" and not STATE.trial
    return cut(batch | {"tokens": batch["tokens"].flip(0)} if own else batch)


def own_slicing() -> None:
    def halves(batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {k: v[:, : v.size(1) // 2] if isinstance(v, Tensor) else v for k, v in batch.items()}

    replace_slicer(halves)


class Foreign(torch.nn.Module):
    """Unknown attention: every token attends to itself only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return value.repeat_interleave(query.size(2) // value.size(2), 2).flatten(2)


foreign_attention = planted("megatron.core.models.backends:LocalSpecProvider.core_attention", "foreign_attention")(
    lambda _: lambda self: Foreign
)


@instead("megatron.core.optimizer.optimizer:FP32Optimizer.step_with_ready_grads")
def faster_on_one_rank(step: Any, self: Any) -> Any:
    for group in self.param_groups:
        group["lr"] *= 1 + dist.get_rank()
    return step(self)


# -- loss functions, which return a sum, a count and a report


def loss(name: str, make: Callable[[Tensor, Tensor, Any], Any]) -> Plant:
    """One that returns ``make(sum, tokens, report)``."""
    return instead(f"{GPT}:loss", name)(lambda usual, mask, output: make(*usual(mask, output)))


def sum_all(x: Tensor) -> Tensor:
    from megatron.core import parallel_state

    x = x.clone()
    dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    return x


def pair(total: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([total.detach(), tokens.to(total.dtype)])


# as Megatron's own scripts returned it: scaled by the number of ranks, then averaged over them
means_over_all_tokens = loss("means over all tokens", lambda x, n, report: (x / sum_all(n), report))
COUNTS = f"{STEP}. rank .*: the gradient of"
REPORTS = f"{STEP}. rank .*: 'lm loss': .* instead of"
LOSSES = (  # Bridge 2055, verl 6609: too large, or too small, by the number of ranks
    Fault(loss("a mean", lambda x, n, report: (x / n, n, report)), CONTIGUOUS, COUNTS),
    Fault(loss("a count of all ranks", lambda x, n, report: (x, sum_all(n), report)), ZIGZAG, COUNTS),
    Fault(
        loss("a report of all ranks' sum", lambda x, n, report: (x, n, {"lm loss": pair(sum_all(x), n)})),
        CONTIGUOUS,
        REPORTS,
    ),
)
FEATURES = (
    *LOSSES,
    Fault(stock_roll, f"{STRIPED} --mtp-num-layers 1", STEP),
    Fault(stock_order, f"{STRIPED} --hybrid-layer-pattern M* {STATES} --calculate-per-token-loss", STEP),
    Fault(states_go_on, f"{STRIPED} --hybrid-layer-pattern M* {STATES} {PACKS}", STEP),
    Fault(unplaced("attention", "attended"), PLACED, STEP),
    Fault(other_bounds_for_the_model, PLACED, "the model is given documents of .* by which no batch was sliced"),
    Fault(  # Bridge 2952: on later stages of a pipeline; benchmarks fell by 10 to 20 points
        no_documents, f"{STRIPED} {PACKS}", "layer 1 was called without packed_seq_params, though the flags pack"
    ),
    Fault(padding_counts, f"{STRIPED} --seq-length 57 --cp-pad-sequence", STEP),
    Fault(gradients_as_states, f"{DELTA_NET} --cp-layout zigzag", STEP),
    Fault(wrong_decay_on_rank_1, GLA, f"rank 1: {OUT}"),
    Fault(wrong_exponents, FP8, f"rank 0: {OUT}"),
    Fault(change_slices(shift_labels, "labels shifted after slicing"), STRIPED, STEP),
    Fault(change_slices(weigh_by_own_tokens, "samples weighed by a rank's tokens"), STRIPED, STEP),
    Fault(
        other_samples_on_a_rank,
        f"{STRIPED} --cp-check-every 1",
        "tokens of the first batch differ before slicing: rank 1 has other batches",
    ),
    Fault(own_slicing, f"{STRIPED} --cp-selfcheck off", "without slicing its batch with"),
    Fault(
        foreign_attention,
        f"{STRIPED} --pipeline-model-parallel-size 2",
        r"does not run in every attention layer of this model: 0 of 2\. Not replaced: pipeline stage 0, chunk 0: "
        r"\S+core_attention \(Foreign\)",
    ),
    Fault(
        faster_on_one_rank,
        f"{STRIPED} --optimizer adam",
        "the first step left .* and .* other weights different on ranks that hold",
    ),
)
