"""A checked step compares rotary embeddings of one layer: a few rows of q and k, before and after the rotation.

    before    what the layer's rotation is given: queries and keys; under MLA, parts of them
    after     what core attention receives
    between   a rotation by the angles of these tokens' positions, in float64

Angles are position times frequency, with frequencies copied before training: independent of the model's table, of its
slice on this rank, and of what slices it. A kind of layer that rotates in another form, or agrees on no rank in its
first check, is named once, and not compared.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer import multi_latent_attention as latent
from torch import Tensor

from cp_plugin.engine.comm.every_rank import gather_ranks
from cp_plugin.megatron import runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.mixers import modelopt
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.selfcheck.checked_call import CALL, Drawn

_ROWS = 8
_ROTATES = "apply_rotary_pos_emb"
_UNITS = 8.0
"""Limit of an element's error in units of the dtype's epsilon times the magnitudes of what is rotated into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """The rotation of a layer."""

    frequencies: Tensor  # float32 [r / 2]: angles of position 1
    step: float = 1.0  # positions are multiplied by it
    scale: float = 1.0  # and cosines and sines by this
    interleaved: bool = False  # pairs are neighbours, not halves
    regrouped: bool = False  # neighbours become halves before the rotation: MLA's

    def rotated(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation of rows, and the limit of its rounding: float64 ``[n, ..., d]``; positions ``[n]``."""
        at = positions.float() * self.step
        angles = torch.outer(at, self.frequencies.to(x.device)).double()
        angles = angles.view(len(x), *(1,) * (x.dim() - 2), -1)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        width = 2 * angles.size(-1)
        turned, rest = x[..., :width].double(), x[..., width:].double()
        if self.regrouped:
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        size = (a.abs() + b.abs()) * max(1.0, self.scale)
        pairs = (a * cos - b * sin, b * cos + a * sin), (size, size)
        join = (lambda pair: torch.stack(pair, -1).flatten(-2)) if self.interleaved else partial(torch.cat, dim=-1)
        joined, sizes = map(join, pairs)
        info = torch.finfo(x.dtype)
        allowed = _UNITS * (info.eps * sizes + info.smallest_normal * info.eps)
        return torch.cat((joined, rest), -1), torch.cat((allowed, torch.zeros_like(rest)), -1)


def angles_of(layer: Any, rotary: Any) -> Angles | None:
    """The rotation of an attention layer; None: of a form that is not compared, such as multimodal positions.

    rotary: Megatron's embedding for this layer.
    """
    latents = isinstance(layer, latent.MultiLatentAttention)
    shared: dict[str, Any] = {"interleaved": layer.config.rotary_interleaved, "regrouped": latents}
    if type(rotary) is YarnRotaryEmbedding:
        table, scale = rotary.get_emb(2)
        frequencies = table[1].flatten()[: table.size(-1) // 2].float().clone()
        scale = scale if latents else getattr(layer, "_yarn_concentration_factor", scale)
        return Angles(frequencies=frequencies, scale=scale, **shared)
    if type(rotary) is not RotaryEmbedding:
        return None
    factor = rotary.seq_len_interpolation_factor
    return Angles(frequencies=rotary.inv_freq.clone(), step=1.0 if factor is None else 1 / factor, **shared)


def watch(chunks: Sequence[torch.nn.Module], due: Callable[[], int]) -> None:
    """Attach the check to the attention layers that rotate."""
    layers = {layer: angles_of(layer, rotary) for chunk in chunks for layer, rotary in _rotating(chunk)}
    if layers:
        _Watch(layers, due)


def _rotating(chunk: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Attention layers, each with its embedding."""
    rotary = next((x for m in chunk.modules() if (x := getattr(m, "rotary_pos_emb", None)) is not None), None)
    for layer in chunk.modules():
        core = getattr(layer, "core_attention", None)
        if not isinstance(core, AnyCoreAttention) or modelopt.quantizes(core):
            continue
        own = getattr(layer, "rotary_pos_emb", None) or rotary
        without = getattr(layer.config, "no_rope_freq", None)
        if own is not None and not (without and without[layer.layer_number - 1]):
            yield layer, own


class _Watch:
    """Draw one layer's call of a step, and compare its rotation."""

    def __init__(self, layers: dict[Any, Angles | None], due: Callable[[], int]) -> None:
        self._layers, self._drawn = layers, Drawn(due, " rotation")
        self._call: _Call | None = None
        self._armed: set[type] = set()
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.core_attention.register_forward_pre_hook(self._attends, with_kwargs=True)

    def _enter(self, layer: Any, _: Any) -> None:
        if not self._drawn.take(layer.training, layer, self._layers):
            return
        if (angles := self._layers[layer]) is None:
            self._leave_out(layer)
        else:
            self._call = _Call(layer, angles, self._drawn.draw)

    def _attends(self, core: AnyCoreAttention, args: Any, named: dict[str, Any]) -> None:
        call = self._call
        if call is None or call.layer.core_attention is not core:
            return
        self._call = None
        call.close()
        arguments = CALL.bind(core, *args, **named).arguments
        q, k, packed = arguments["query"], arguments["key"], arguments.get("packed_seq_params")
        if not call.fits(q, k):
            self._leave_out(call.layer)
            return
        batch = core.micro_batch(packed, q.size(0))
        place = self._drawn.place(batch.cp, core.cp_group, core)
        with place.booked():
            everyone = gather_ranks(place.cp.mesh, call.wrong(batch, q, k, packed)).tolist()
        if type(call.layer) not in self._armed and all(rows for rows, *_ in everyone):
            self._leave_out(call.layer)
            return
        self._armed.add(type(call.layer))
        texts = [
            f"{rows:.0f} of {2 * len(call.at)} rows of q or k, such as token {token:.0f}, off by {error:.1e}, where "
            f"rounding allows {allowed:.1e}"
            if rows
            else ""
            for rows, token, error, allowed in everyone
        ]
        place.stop_if_any(
            place.name_ranks(texts),
            "queries or keys",
            "are not rotated by their positions",
            "A table of angles was overwritten or sliced for another rank, or the rank has its tokens in another order",
        )

    def _leave_out(self, layer: Any) -> None:
        """Stop comparing layers of this kind, and say so once."""
        kind = type(layer)
        self._layers = {other: x for other, x in self._layers.items() if type(other) is not kind}
        runtime.print_notice(
            f"--cp-check-every does not compare RoPE of {kind.__name__}: its angles or its rotation have another form"
        )


class _Call:
    """Rows of q and k before the rotation, from the layer's next forward until ``close``."""

    def __init__(self, layer: Any, angles: Angles, draw: random.Random) -> None:
        self.layer, self.angles = layer, angles
        self.rows: list[Tensor] = []  # of q and k
        self.at: list[int] = []
        self._seed = draw.random()
        owner = sys.modules[type(layer).forward.__module__]
        rotate = getattr(owner, _ROTATES, None)

        def rotating(t: Tensor, *args: Any, **named: Any) -> Tensor:
            if len(self.rows) < 2:
                self._keep(t)
            return rotate(t, *args, **named)

        self.close = (lambda: None) if rotate is None else patching.lend(owner, _ROTATES, rotating)

    def _keep(self, x: Tensor) -> None:
        if not self.at:
            rank = 0 if self.layer.core_attention.cp_group is None else self.layer.core_attention.cp_group.rank()
            self.at = random.Random(f"{self._seed} {rank}").sample(range(x.size(0)), min(_ROWS, x.size(0)))
        self.rows.append(_rows(x, self.at).clone())

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Whether attention has the rows that were rotated: MLA rotates one key for all heads, and a part of each."""
        if len(self.rows) != 2:  # a rotation fused with the projections
            return False
        pairs = [(before, _rows(x, self.at)) for before, x in zip(self.rows, (q, k), strict=True)]
        return all(
            after.shape[:2] == before.shape[:2]
            and before.size(2) in (1, after.size(2))
            and (self.angles.regrouped or before.size(3) == after.size(3))
            for before, after in pairs
        )

    def wrong(self, batch: MicroBatch, q: Tensor, k: Tensor, packed: Any) -> Tensor:
        """Number of wrong rows, then one wrong token, its error and limit: float64 ``[4]``."""
        tokens_here = batch.positions(torch.device("cpu"))[self.at].to(q.device)
        positions, compared = tokens_here, torch.ones_like(tokens_here, dtype=torch.bool)
        if batch.documents is not None:
            where = batch.documents.places.to(q.device)
            positions = batch.documents.offset_of(tokens_here)
            compared = tokens_here < where[-1]  # padding behind the last document has no positions
            if where.numel() > 2 and max(packed.max_seqlen_q, packed.max_seqlen_kv) >= batch.tokens:
                compared = torch.zeros_like(compared)  # Megatron before 0.20 counts through such a pack
        verdict = torch.zeros(4, dtype=torch.float64, device=q.device)
        for before, x in zip(self.rows, (q, k), strict=True):
            after = _rows(x, self.at)[..., -before.size(-1) :].double()
            want, limit = self.angles.rotated(before, positions)
            error, limit = ((after - want).abs().flatten(1), limit.expand_as(after).flatten(1))
            beyond = (error - limit).nan_to_num(nan=-1.0).where(compared[:, None], -1.0)  # NaN is for the loss scaling
            worst = torch.unravel_index(beyond.argmax(), beyond.shape)
            one = torch.stack((tokens_here[worst[0]].double(), error[worst], limit[worst]))
            wrong = (beyond > 0).any(1).sum()
            verdict[1:] = torch.where((wrong > 0) & (verdict[0] == 0), one, verdict[1:])
            verdict[0] += wrong
        return verdict


def _rows(x: Tensor, at: Sequence[int]) -> Tensor:
    """Some rows ``[n, ..., h, d]`` of ``[s, b, h, d]``, or of a pack's ``[s, h, d]``, whose batch may be kept as 1."""
    rows = x.detach()[list(at)]
    return rows.unsqueeze(1) if rows.dim() == 3 else rows
