"""Self-check of a model outside its attention: what it computes for a token depends on that token and its label alone.

    tokens and labels, twice; some differ --> the model, with attention of each token to itself --> the others' losses
    the tokens, and again in reverse      --> the same                                          --> the same losses
    the angles that the model's layers are given: those of the positions

Context-parallel ranks hold tokens that are no neighbours, so a model that shifts labels, or mixes tokens in a layer of
its own (a convolution, an average over the sequence), would train on other pairs than one rank does. The losses of
tokens that do not differ must be equal; of pipeline stages, the hidden states that they hand on. Neither may they
depend on a token's place among those of its rank, or on how many these are: a model that counts positions by itself, or
scales by the length of its input, would do so by a rank's part of the sequence. A token attends to itself with a weight
made of its query and key, so that these are checked, too; both are rotated alike, which leaves it as it is.

Not checked: models with layers that mix tokens and have context parallelism of their own (Mamba, gated delta net,
multi-token prediction), experts of limited capacity, and settings that a forward pass before training would disturb, or
under which routers draw (``disturbed_by``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.utils import unwrap_model
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention
from cp_plugin.megatron.patches import delta_net, hybrid, patching
from cp_plugin.megatron.rules.experts import BALANCED, RANDOM, balancing
from cp_plugin.megatron.selfcheck.attention_pass import table_of

_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.1
"""Of the largest change of a token by itself: kernels of experts round by how many tokens each expert has."""
_DISTURBED = ("fp8", "fp4", "cpu_offloading", "fine_grained_activation_offloading", "enable_cuda_graph")
"""Settings of histories, copies and graphs that a forward pass would begin."""


def independence_problems(chunks: Sequence[torch.nn.Module], positions: Tensor) -> list[str]:
    """Errors of a model that mixes tokens; collective over the tensor- and expert-parallel ranks.

    Args:
        positions: of this rank's tokens: ``[s/cp]``.
    """
    problems: list[str] = []
    for chunk in chunks:
        model: Any = unwrap_model(chunk)
        if off(chunk, model):
            continue
        if (setting := disturbed_by(model.config)) is None:
            problems += _of_chunk(chunk, model, positions)
        elif dist.get_rank() == 0:
            print(f"cp_plugin: the self-check leaves out the model outside of attention: {setting} is set", flush=True)
    return problems


def disturbed_by(config: Any) -> str | None:
    """The setting under which a pass before training draws, or begins a history, a copy, a graph or a buffer."""
    found = next((name for name in (*_DISTURBED, *RANDOM) if getattr(config, name, None)), None)
    flex = getattr(config, "moe_token_dispatcher_type", None) == "flex"
    if flex and getattr(config, "moe_flex_dispatcher_backend", None) == "hybridep":  # its buffer fits the first batch
        found = "moe_flex_dispatcher_backend"
    return found


def off(chunk: Any, model: Any) -> bool:
    """Whether a part of the model is not checked."""
    if type(chunk) is not DistributedDataParallel or not isinstance(model, LanguageModule):
        return True
    config: Any = model.config
    mixes = any(isinstance(m, MultiTokenPredictionBlock) or hybrid.keeps_layout(m) for m in model.modules())
    attention = [module for module in model.modules() if isinstance(module, AnyCoreAttention)]
    return (
        mixes
        or any(map(delta_net.replaced, model.modules()))
        or any(type(module).forward is not AnyCoreAttention.forward for module in attention)
        or getattr(config, "cuda_graph_impl", "none") != "none"
        or getattr(config, "moe_expert_capacity_factor", None) is not None
        or not {*balancing(config)} <= BALANCED
        or bool(chunk.ddp_config.overlap_param_gather)
        or getattr(model, "position_embedding_type", "") == "mrope"
    )


def _of_chunk(chunk: Any, model: Any, positions: Tensor) -> list[str]:
    tokens = positions.numel()
    other = torch.rand(tokens, generator=torch.Generator().manual_seed(50)).lt(0.5).to(positions.device)
    ids = (positions * 7 + 3) % model.vocab_size
    hidden = torch.randn(tokens, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(51))
    hidden = hidden.to(positions.device, model.config.params_dtype)
    with _apart(chunk), _given_angles(model, tokens) as angles:
        same = _outputs(chunk, model, positions, ids, hidden)
        twice = _outputs(chunk, model, *(torch.cat((x, x.flip(0))) for x in (positions, ids, hidden)))
        changed = _outputs(
            chunk,
            model,
            positions,
            torch.where(other, (ids + 1) % model.vocab_size, ids),
            torch.where(other[:, None, None], -hidden, hidden),
        )
    apart = (same - changed).abs().flatten(1).amax(1)
    differs = other if len(apart) == tokens else _own_part(other, model)
    kept, moved = apart[~differs].amax(), apart[differs].amax()
    exact = model.config.params_dtype == torch.float32
    allowed = _TOLERANCE if exact else _TOLERANCE_HALF
    what = "loss" if model.post_process else "output"
    problems = _of_angles(model, tokens, angles[0]) if angles else []
    if not kept <= allowed * moved:
        problems.append(
            f"the model mixes tokens outside of attention: other tokens change a token's {what} by {kept:.1e}, itself "
            f"by {moved:.1e} (allowed: {allowed:.0e} of that). Shift labels before the batch is sliced, and give "
            "layers that mix tokens context parallelism"
        )
    elif len(same) == tokens and (exact or not model.config.num_moe_experts):  # other sizes, other near ties of experts
        elsewhere = (twice - torch.cat((same, same.flip(0)))).abs().amax()
        if not elsewhere <= allowed * moved:
            problems.append(
                f"the model computes by a token's place among those of its rank, or by their number: either changes a "
                f"token's {what} by {elsewhere:.1e}, the token by {moved:.1e} (allowed: {allowed:.0e} of that). Take "
                "positions from position_ids, and lengths from the configuration"
            )
    return problems


def _of_angles(model: Any, tokens: int, given: Tensor) -> list[str]:
    """Whether the model's layers are given the angles of this rank's positions."""
    if not isinstance(model.rotary_pos_emb, RotaryEmbedding):
        return []
    cp = runtime.context_parallel()
    table = table_of(model.rotary_pos_emb.get_emb(tokens * cp.size))
    want = table[cp.positions(tokens * cp.size, table.device)]
    if want.shape == given.shape and torch.equal(want, given):
        return []
    return ["the model gives its layers the angles of other tokens than this rank's"]


@contextmanager
def _given_angles(model: Any, tokens: int) -> Iterator[list[Tensor]]:
    """The rotary embeddings ``[s/cp, r]`` that the model gives to its layers in the block.

    Raises:
        ValueError: for a number of them that is none of the tokens.
    """
    found: list[Tensor] = []

    def look(_: Any, __: Any, named: dict[str, Any]) -> None:
        angles = named.get("rotary_pos_emb")
        if isinstance(angles, Tensor):
            found.append(table_of(angles))
            if len(angles) % tokens:
                raise ValueError(
                    f"the model gives its layers {len(angles)} angles of RoPE for {tokens} tokens of a rank: "
                    "it does not count the tokens of all ranks. Use a Megatron without this change, or "
                    "--cp-provider upstream"
                )

    layers = getattr(model, "decoder", None)
    if layers is None:
        yield found
        return
    hook = layers.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def _outputs(chunk: Any, model: Any, positions: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
    """By token, losses ``[s/cp, 1]`` or hidden states ``[s/cp, h]``; of sequence parallelism ``[s/cp/tp, h]``."""
    if not model.pre_process:
        model.set_input_tensor(_own_part(hidden, model))
    out = chunk.module(ids[None], positions[None], None, labels=ids[None])
    return (out.view(-1, 1) if model.post_process else out.flatten(1)).float()


def _own_part(x: Tensor, model: Any) -> Tensor:
    """A tensor-parallel rank's tokens under sequence parallelism."""
    if not model.config.sequence_parallel:
        return x
    return x.chunk(parallel_state.get_tensor_model_parallel_world_size())[
        parallel_state.get_tensor_model_parallel_rank()
    ]


@contextmanager
def _apart(chunk: torch.nn.Module) -> Iterator[None]:
    """In the block tokens attend to themselves, and nothing is drawn, recorded or kept for a backward pass."""
    training = [module for module in chunk.modules() if module.training]
    chunk.eval()
    try:
        with torch.no_grad(), patching.lent(AnyCoreAttention, forward=_to_itself):
            yield
    finally:
        for module in training:
            module.training = True


def _to_itself(layer: AnyCoreAttention, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
    """Stands in for attention; gated linear attention has its gates beside the values."""
    if getattr(layer, "gate", None) is not None:
        value = value.chunk(2, -1)[0]
    key, value = (x.repeat_interleave(query.size(-2) // x.size(-2), -2) for x in (key, value))
    query, key = query.float(), key.float()
    sizes = (query.norm(dim=-1) * key.norm(dim=-1)).clamp(min=1e-9)
    weight = 1 + (query * key).sum(-1) / sizes + (8 * sizes.log()).sin()  # as steep for trained weights as for new ones
    return (value * weight.unsqueeze(-1).to(value.dtype)).flatten(-2)
