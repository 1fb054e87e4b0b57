"""Generation from a Megatron model: softmax layers shard keys and values over the context-parallel ranks, linear layers
replicate their state.

    with decoding(model, batch=1, context=100_000) as so_far:
        logits = so_far.prefill(prompt)                 # of the last token; any provider, optionally in chunks
        logits = so_far.extend(next_token)              # one small message per softmax layer

The block leaves the model unchanged. One pipeline stage, no sequence parallelism.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.inference import Session, slots_for
from cp_plugin.engine.inference.slots import Chunk
from cp_plugin.engine.inference.store import Latent
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.mixers import table
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.mixers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.rules import layers as rules
from cp_plugin.megatron.rules.rule import refuse
from cp_plugin.megatron.state import STATE

_CONTINUED = (AnyCoreAttention, DotProductAttention)
"""The plugin's attention and, without context parallelism, Megatron's own."""


class Decoding:
    """The caches of a batch of texts; made by ``decoding``."""

    def __init__(self, model: torch.nn.Module, session: Session) -> None:
        self.session = session
        self.states: dict[int, Tensor] = {}
        """Layer number -> state of a linear layer: ``[b, g, d, e]``."""
        self.compressed: dict[int, Callable[[Tensor], Latent]] = {}
        """Layer number -> cache entry of multi-latent attention in this step, by its keys."""
        self._model = model
        self._lengths: list[int] = []
        self._complete = False
        """Whether this step has the prompts' last tokens."""
        self._last: Tensor | None = None
        """Hidden states of the prompts' last tokens, ``[1, b, hidden]``, where this rank has them."""
        self._owner: list[int] = []
        """The rank that has each."""
        self.rows = torch.empty(0)
        """Positions of this step's tokens: ``[s]``, or ``[s, b]`` where sequences differ."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's caches."""
        return self.session.nbytes + sum(state.nbytes for state in self.states.values())

    def prefill(self, tokens: Tensor, lengths: Sequence[int] | None = None, chunk: int | None = None) -> Tensor:
        """Prefill the caches with the prompts.

        Args:
            tokens: int64 ``[b, n]``, the same on every rank; sequences may be padded with any token.
            lengths: of each sequence; None: n.
            chunk: tokens per forward (rounded up to a multiple that the layout divides); None: all.

        Returns:
            Logits ``[b, vocabulary]`` after each prompt's last token, on every rank.

        Raises:
            ValueError: for empty prompts, or invalid lengths.
            CacheFullError: if they do not fit.
        """
        n = tokens.size(1)
        lengths = [n] * tokens.size(0) if lengths is None else list(lengths)
        if n == 0 or len(lengths) != tokens.size(0) or not all(1 <= length <= n for length in lengths):
            raise ValueError(f"prompts need 1 token or more: got {tuple(tokens.shape)} with lengths {lengths}")
        self._lengths, self._last, self._owner = lengths, None, [0] * len(lengths)
        cp = self.session.cp
        divisor = cp.layout.divisor(cp.size)
        step = slots_for(min(chunk or n, n), 1, divisor)
        tokens = torch.nn.functional.pad(tokens, (0, -n % divisor))
        for first in range(0, tokens.size(1), step):
            part = tokens[:, first : first + step]
            self._complete = first + step >= tokens.size(1)
            with self.session.prefill(part.size(1)) as taken:
                self.rows = taken.positions.to(tokens.device)
                logits = self._forward(cp.shard(part, 1))
        self.session.close(lengths)
        return logits[:, 0]

    def extend(self, tokens: Tensor) -> Tensor:
        """Logits ``[b, t, vocabulary]`` after the next tokens ``[b, t]``, on every rank; CacheFullError if full."""
        with self.session.decode(tokens.size(1)) as dealt:
            alike = len(set(self.session.lengths)) == 1
            self.rows = dealt.positions[:, 0] if alike else dealt.positions
            return self._forward(tokens)

    def _forward(self, tokens: Tensor) -> Tensor:
        positions = self.rows.long()
        positions = positions.expand_as(tokens) if positions.dim() == 1 else positions.T
        logits = self._model(tokens, positions, None)
        parallel = utils.get_attr_wrapped_model(self._model, "parallel_output")
        return gather_from_tensor_model_parallel_region(logits) if parallel else logits

    def softmax(self, layer: CoreAttention | DotProductAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A step of a softmax layer."""
        config = layer.config
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number)
        window = tuple(config.window_size) if windowed else None
        scale, sink = layer.softmax_scale, layer.softmax_offset
        if isinstance(layer, DotProductAttention) and config.apply_query_key_layer_scaling:
            scale = layer.softmax_scale * layer.layer_number  # Megatron's softmax multiplies by it, in float32
        compressed = self.compressed.pop(layer.layer_number, None)
        latent = None if compressed is None else compressed(k)
        scores = {"scale": scale, "softcap": compat.softcap(config)}
        return self.session.attend(layer.layer_number, q, k, v, **scores, window=window, sink=sink, latent=latent)

    def linear(self, layer: LinearCoreAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A step of a linear layer."""
        state = self.states.get(layer.layer_number)
        v, gate = v.chunk(2, 3) if layer.gate is not None else (v, None)
        attend = None
        if isinstance(self.session.step, Chunk):
            kept = self.rows.unsqueeze(1) < torch.tensor(self._lengths, device=q.device)  # False for padding
            attend = partial(layer.context_parallel.extend_linear, kept=kept)
        out, state = layer.linear.extend(q, k, v, gate, state, attend)
        self.states[layer.layer_number] = state
        return out

    def output(self, original: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The output layer's forward for this rank's hidden states ``[s / cp, b, hidden]``; of prompts, it is given the
        last tokens only."""
        if not isinstance(self.session.step, Chunk):
            return original(hidden, *args, **kwargs)
        last = self._collect(hidden, self.session.step)
        if not self._complete:
            return hidden[:0], None
        everywhere = self.session.mesh.all_gather("cp", (last,)).wait()[0]
        return original(everywhere[self._owner, range(len(self._owner))].unsqueeze(0), *args, **kwargs)

    def _collect(self, hidden: Tensor, taken: Chunk) -> Tensor:
        if self._last is None:
            self._last = torch.zeros_like(hidden[:1])
        for sequence, length in enumerate(self._lengths):
            for rank, segments in enumerate(taken.rows):
                if any(length - 1 in segment for segment in segments):
                    self._owner[sequence] = rank
            row = (taken.positions == length - 1).nonzero()
            if len(row):
                self._last[0, sequence] = hidden[int(row), sequence]
        return self._last


def check(model: torch.nn.Module) -> None:
    """ValueError for a model that generation does not support."""
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, _CONTINUED)]
    stateful = (mixer for module in modules for mixer in table.MIXERS if mixer.has_state(module))
    states = [f"{mixer.name} layers ({mixer.letter})" for mixer in stateful]
    attention = [getattr(module, "core_attention", None) for module in modules]
    others = [
        type(one).__name__ for one in attention if isinstance(one, torch.nn.Module) and not isinstance(one, _CONTINUED)
    ]
    continued = rules.Continued(
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        layers=len(layers),
        sequence_parallel=any(layer.config.sequence_parallel for layer in layers),
        stateful=", ".join(dict.fromkeys(states)),
        converted=runtime.converted(),
        other_attention=", ".join(dict.fromkeys(others)),
    )
    refuse(rules.CONTINUED, continued)


@contextmanager
def decoding(model: torch.nn.Module, *, batch: int, context: int, fp8: bool = False) -> Iterator[Decoding]:
    """Inside the block, the model's forward continues a batch of texts.

    Args:
        batch: number of sequences.
        context: tokens of the longest, including those to be generated.
        fp8: cache keys and values in FP8.

    Raises:
        ValueError: for a model with several pipeline stages, sequence parallelism, or unsupported layers.
    """
    check(model)
    cp = runtime.context_parallel() if runtime.settings().kinds else ContextParallel(group=None)
    group = parallel_state.get_context_parallel_group() if cp.size > 1 else None
    divisor = cp.layout.divisor(cp.size)
    capacity = slots_for(context, cp.size, max(1, divisor // cp.size))
    device = next(model.parameters()).device
    session = Session(cp, batch=batch, capacity=capacity, group=group, fp8=fp8, device=device)
    so_far = Decoding(model, session)
    STATE.cut.any = True
    with ExitStack() as back:
        for owner, name, value in list(_replacements(model, so_far)):
            back.callback(patching.lend(owner, name, value))
        yield so_far


def _replacements(model: torch.nn.Module, so_far: Decoding) -> Iterator[tuple[Any, str, Any]]:
    """Attributes to replace in the model: object, name, value."""
    for module in model.modules():
        if isinstance(module, AnyCoreAttention):
            step = so_far.linear if isinstance(module, LinearCoreAttention) else so_far.softmax
            yield module, "attend", partial(_attend, step, module)
        elif isinstance(module, DotProductAttention):
            yield module, "forward", partial(_forward, so_far, module)
        elif isinstance(module, RotaryEmbedding | YarnRotaryEmbedding):
            yield module, "forward", partial(_rotate, module, so_far)
        up = getattr(module, "linear_kv_up_proj", None)
        if up is not None and getattr(up, "layer_norm_weight", None) is None:
            yield up, "forward", partial(_note, up.forward, module, up, so_far)
        if hasattr(module, "output_layer"):
            yield module.output_layer, "forward", partial(so_far.output, module.output_layer.forward)
        config = getattr(module, "config", None)
        if getattr(module, "mtp_process", False) and config is not None:  # multi-token prediction is for training
            plain = copy.copy(config)
            plain.mtp_num_layers = None
            yield module, "mtp_process", False
            yield module, "config", plain


def _attend(step: Callable[..., Tensor], layer: AnyCoreAttention, _: Any, *qkv: Tensor, causal: bool) -> Tensor:
    return step(layer, *qkv)


def _forward(so_far: Decoding, layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return so_far.softmax(layer, query, key, value).flatten(2)


def _note(original: Callable[..., Any], layer: Any, up: Any, so_far: Decoding, rows: Tensor, *args: Any) -> Any:
    so_far.compressed[layer.layer_number] = partial(_latent, rows, up.weight, layer.config)
    return original(rows, *args)


def _latent(rows: Tensor, weight: Tensor, config: Any, k: Tensor) -> Latent:
    """The cache entry of a layer of multi-latent attention in one step.

    Args:
        rows: latent vectors after the norm: ``[s, b, r]``.
        weight: the up-projection's: ``[h * (d - p + e), r]``.
        k: ``[s, b, h, d]``; the p elements with RoPE are the same in every head.
    """
    plain = config.qk_head_dim  # d - p
    weight = weight.unflatten(0, (-1, plain + config.v_head_dim))
    rows = torch.cat((rows, k[:, :, 0, plain:]), 2).unsqueeze(2)
    return Latent(rows, weight[:, :plain], weight[:, plain:])


def _rotate(module: Any, so_far: Decoding, *_: Any, **__: Any) -> Tensor | tuple[Tensor, float]:
    """Angles ``[s, 1 or b, 1, d]``; YaRN's with their factor."""
    at = so_far.rows
    first = int(at.min())
    embedding = module.get_emb(int(at.max()) - first + 1, first)
    angles, *factor = embedding if isinstance(embedding, tuple) else (embedding,)
    rows = angles[(at - first).long()]
    rows = rows if at.dim() == 1 else rows.squeeze(2)
    return (rows, *factor) if factor else rows
