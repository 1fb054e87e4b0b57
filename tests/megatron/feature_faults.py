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
from cp_plugin.engine.core.block import Scores

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
stock_counts = stock("stock_counts", f"megatron.core.models.gpt.gpt_model:process_mtp_loss={MTP}:process_mtp_loss")
REORDER = "megatron.core.ssm.mamba_context_parallel:_{}do_attention_load_balancing"
stock_order = stock("stock_order", REORDER.format("un"), REORDER.format("re"))
next_of_another_document = instead("cp_plugin.megatron.patches.mtp:_rolled", "next_of_another_document")(
    lambda rolled, cp, x, dim, by, packed, fill=0: rolled(cp, x, dim, by, None, fill)
)
delta_net_runs_on = instead("cp_plugin.megatron.mixers.gated_delta_net:attend", "delta_net_runs_on")(
    lambda attend, layer, batch, projected: attend(layer, replace(batch, documents=None), projected)
)


@instead(REORDER.format("un"))
def states_go_on(undo: Any, x: Tensor, size: int, packed: Any = None) -> Tensor:
    ordered = undo(x, size, packed)
    if packed is not None:
        packed.seq_idx = None
    return ordered


def reversed_order_of_a_pack() -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    orders = common._build_thd_cp_a2a_perm
    for module in (common, gdn):  # gdn calls it
        module._build_thd_cp_a2a_perm = lambda *pack: orders(*pack)[::-1]


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
own_tokens_alone = instead("cp_plugin.engine.attention.convolution:_sent", "own_tokens_alone")(
    lambda fetch, *args: fetch(*args) * 0
)
gradients_as_states = instead("cp_plugin.engine.linear.scan:transposed", "gradients_as_states")(lambda _, x: x)


another_delta_net = planted("megatron.core.ssm.gated_delta_net:GatedDeltaNet.__name__", "another_delta_net")(
    lambda name: f"{name}2"
)


# -- linear and softmax layers, FP8

ATTENTION = "cp_plugin.engine.attention.api:ContextParallel"


def attend_in(layout: str, provider: str, kind: Any, owner: str) -> Plant:
    """Layers of a class compute in another layout than their tokens have."""

    def attention(_: Any) -> ContextParallel:
        from cp_plugin.megatron import runtime

        return ContextParallel(provider, mesh=runtime.context_parallel(kind=kind).mesh, layout=layout)

    name = f"{kind} attention in {layout}"
    return planted(f"cp_plugin.megatron.mixers.{owner}.context_parallel", name)(lambda _: property(attention))


linear_layers_in_another_layout = attend_in("contiguous", "lasp2", "linear", "linear_attention:LinearCoreAttention")
wrong_decay_on_rank_1 = instead(f"{ATTENTION}.linear_attention", "wrong_decay_on_rank_1")(
    lambda attend, self, q, k, v, log_decay, **kwargs: attend(
        self, q, k, v, log_decay * (1.01 if dist.get_rank() == 1 else 1.0), **kwargs
    )
)


@instead("cp_plugin.megatron.runtime:register")
def linear_layers_with_the_tokens_of_other_ranks(register: Any, group: Any, by_kind: Any) -> None:
    by_kind["linear"].numbers = by_kind["linear"].numbers[::-1]
    register(group, by_kind)


softmax_layers_wrong = instead(f"{ATTENTION}.attention", "softmax_layers_wrong")(
    lambda attend, self, *args, **kwargs: 1.01 * attend(self, *args, **kwargs)
)


@instead("cp_plugin.engine.core.payload:pack")
def wrong_exponents(pack: Any, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    elements, exponents = pack(x, block)
    return elements, exponents.roll(1, 2) + 1


scores_a_tenth_too_large = instead(f"{ATTENTION}.method", "scores_a_tenth_too_large")(  # less than FP8's own rounding
    lambda method, self, problem, device, scores, *rest: method(
        self, problem, device, Scores(1.1 * scores.scale), *rest
    )
)

# -- scripts


def change_slices(change: Callable[[dict[str, Any]], None], name: str) -> Plant:
    def wrong(get: Any, *args: Any) -> dict[str, Any]:
        batch = get(*args)
        change(batch)
        return batch

    return instead(f"{GPT}:get_batch", name)(wrong)


def shift_labels(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"].roll(-1, 1)


def count_positions(batch: dict[str, Tensor]) -> None:
    batch["position_ids"] = torch.arange(batch["tokens"].size(1)).expand_as(batch["tokens"])


def weigh_by_own_tokens(batch: dict[str, Tensor]) -> None:
    batch["loss_mask"] = batch["loss_mask"] / batch["loss_mask"].sum(1, keepdim=True).clamp(min=1)


def generated(batch: dict[str, Tensor]) -> None:
    shift_labels(batch)


generated.__module__ = None  # as of functions made by exec()


def other_samples_on_a_rank(name: str, later: bool) -> Plant:
    """later: only after the first batch."""

    def wrong(cut: Any, batch: dict[str, Tensor]) -> Any:
        from cp_plugin.megatron.state import STATE

        own = os.environ["RANK"] == "1" and not STATE.trial and not (later and STATE.first_batch is not None)
        return cut(batch | {"tokens": batch["tokens"].flip(0)} if own else batch)

    return instead(f"{GPT}:_slice", name)(wrong)


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


def ranks() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_world_size()


def pair(total: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([total.detach(), tokens.to(total.dtype)])


# as Megatron's own scripts returned it: scaled by the number of ranks, then averaged over them
means_over_all_tokens = loss("means over all tokens", lambda x, n, report: (x / sum_all(n), report))
COUNTS = f"{STEP}. rank .*: the gradient of"
REPORTS = f"{STEP}. rank .*: 'lm loss': .* instead of"
LOSSES = (  # Bridge 2055, verl 6609: too large, or too small, by the number of ranks
    Fault(loss("a mean", lambda x, n, report: (x / n, n, report)), CONTIGUOUS, COUNTS, True),
    Fault(loss("a count of all ranks", lambda x, n, report: (x, sum_all(n), report)), ZIGZAG, COUNTS),
    Fault(loss("a sum over all ranks", lambda x, n, report: (ranks() * x, n, report)), ZIGZAG, COUNTS, True),
    Fault(loss("two parts, a mean", lambda x, n, report: (x / n, report)), ZIGZAG, COUNTS, True),
    Fault(
        loss("a report of all ranks' sum", lambda x, n, report: (x, n, {"lm loss": pair(sum_all(x), n)})),
        CONTIGUOUS,
        REPORTS,
    ),
    Fault(
        loss("a report of all ranks' count", lambda x, n, report: (x, n, report | {"loss": pair(x, sum_all(n))})),
        CONTIGUOUS,
        REPORTS.replace("lm loss", "loss"),
        True,
    ),
    Fault(loss("a report of this rank", lambda x, n, _: (x, n, {"lm loss": x.detach() / n})), ZIGZAG, REPORTS, True),
)
FEATURES = (
    *LOSSES,
    Fault(stock_roll, f"{STRIPED} --mtp-num-layers 1", STEP),
    Fault(stock_counts, f"{ZIGZAG} --mtp-num-layers 1 --calculate-per-token-loss --eod-mask-loss", STEP, True),
    Fault(stock_order, f"{STRIPED} --hybrid-layer-pattern M* {STATES} --calculate-per-token-loss", STEP),
    Fault(next_of_another_document, f"{STRIPED} --mtp-num-layers 1 {PACKS}", STEP, True),
    Fault(states_go_on, f"{STRIPED} --hybrid-layer-pattern M* {STATES} {PACKS}", STEP, True),
    Fault(reversed_order_of_a_pack, f"{STRIPED} --hybrid-layer-pattern G* {STATES} {PACKS}", STEP, True),
    Fault(unplaced("attention", "attended"), PLACED, STEP, True),
    Fault(unplaced("batch", "cut"), PLACED, STEP, True),
    Fault(unplaced("rope", "replace_apply_rotary_thd"), PLACED, STEP, True),
    Fault(unplaced("prediction", "_rolled"), f"{PLACED} --mtp-num-layers 1", STEP, True),
    Fault(other_bounds_for_the_model, PLACED, "the model is given documents of .* by which no batch was sliced"),
    Fault(  # Bridge 2952: on later stages of a pipeline; benchmarks fell by 10 to 20 points
        no_documents, f"{STRIPED} {PACKS}", "layer 1 was called without packed_seq_params, though the flags pack"
    ),
    Fault(padding_counts, f"{STRIPED} --seq-length 57 --cp-pad-sequence", STEP),
    Fault(own_tokens_alone, f"{DELTA_NET} --cp-layout contiguous", STEP, True),
    Fault(gradients_as_states, f"{DELTA_NET} --cp-layout zigzag", STEP),
    Fault(delta_net_runs_on, f"{DELTA_NET} {PACKS}", STEP, True),
    Fault(another_delta_net, f"{DELTA_NET} --cp-layout contiguous", r"Not replaced: .*self_attention", True),
    Fault(linear_layers_in_another_layout, GLA, STEP, True),
    Fault(linear_layers_with_the_tokens_of_other_ranks, GLA, STEP, True),
    Fault(wrong_decay_on_rank_1, GLA, f"rank 1: {OUT}"),
    Fault(softmax_layers_wrong, GLA, "rank 0: layer 2, head 3: out", True),
    Fault(wrong_exponents, FP8, f"rank 0: {OUT}"),
    Fault(scores_a_tenth_too_large, FP8, f"rank 0: {OUT}", True),
    Fault(change_slices(generated, "labels shifted by generated code"), STRIPED, STEP, True),
    Fault(change_slices(shift_labels, "labels shifted after slicing"), STRIPED, STEP),
    Fault(
        change_slices(count_positions, "positions counted after slicing"),
        f"{STRIPED} --position-embedding-type learned_absolute",
        STEP,
        True,
    ),
    Fault(change_slices(weigh_by_own_tokens, "samples weighed by a rank's tokens"), STRIPED, STEP, True),
    Fault(
        other_samples_on_a_rank("other samples", later=False),
        f"{STRIPED} --cp-check-every 1",
        "tokens of the first batch differ before slicing: rank 1 has other batches",
    ),
    Fault(
        other_samples_on_a_rank("other samples later", later=True),
        f"{STRIPED} --cp-check-every 1",
        "in step [12], on the striped layout, slices .*tokens differ before slicing: other batches",
        True,
    ),
    Fault(own_slicing, f"{STRIPED} --cp-selfcheck off", "without slicing its batch with"),
    Fault(
        foreign_attention,
        f"{STRIPED} --pipeline-model-parallel-size 2",
        r"does not run in every attention layer of this model: 0 of 2\. Not replaced: pipeline stage 0, chunk 0: "
        r"\S+core_attention \(Foreign\)",
        True,
    ),
    Fault(
        faster_on_one_rank,
        f"{STRIPED} --optimizer adam",
        "the first step left .* and .* other weights different on ranks that hold",
    ),
)
