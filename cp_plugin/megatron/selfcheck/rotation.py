"""A checked step compares rotary embeddings of one layer: a few rows of q and k, before and after the rotation.

    before    what the layer's rotation is given: queries and keys; under MLA, parts of them
    after     what core attention receives
    between   a rotation by the angles of these tokens' positions, in float64

Angles are position times frequency, with frequencies copied before training: independent of the model's table, of its
slice on this rank, and of what slices it. Layers that rotate in another form are named once, and not compared; so is a
kind of layer that agrees on no rank in its first check.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer import multi_latent_attention as latent
from torch import Tensor

from cp_plugin.engine.comm.every_rank import gather_ranks
from cp_plugin.megatron import runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.mixers import modelopt
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.selfcheck.checked_call import CALL, AttentionError, Drawn, Steps

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
        found, sizes = map(join, pairs)
        info = torch.finfo(x.dtype)
        allowed = _UNITS * (info.eps * sizes + info.smallest_normal * info.eps)
        return torch.cat((found, rest), -1), torch.cat((allowed, torch.zeros_like(rest)), -1)


def angles_of(layer: Any, rotary: Any) -> Angles | str:
    """The rotation of an attention layer; or why it is not compared.

    rotary: Megatron's embedding for this layer.
    """
    if isinstance(rotary, MultimodalRotaryEmbedding):
        return "multimodal positions, several for each token"
    config = layer.config
    shared: dict[str, Any] = {
        "interleaved": config.rotary_interleaved,
        "regrouped": isinstance(layer, latent.MultiLatentAttention),
    }
    if type(rotary) is YarnRotaryEmbedding:
        table, scale = rotary.get_emb(2)
        frequencies = table[1].flatten()[: table.size(-1) // 2].float().clone()
        if not shared["regrouped"]:
            scale = getattr(layer, "_yarn_concentration_factor", scale)
        return Angles(frequencies=frequencies, scale=scale, **shared)
    if type(rotary) is not RotaryEmbedding:
        return f"angles by {type(rotary).__name__}"
    factor = rotary.seq_len_interpolation_factor
    return Angles(frequencies=rotary.inv_freq.clone(), step=1.0 if factor is None else 1 / factor, **shared)


def watch(chunks: Sequence[torch.nn.Module], steps: Steps) -> None:
    """Attach the check to the attention layers that rotate."""
    layers = {layer: angles for chunk in chunks for layer, angles in _rotating(chunk)}
    if layers:
        _Watch(layers, steps)


def _rotating(chunk: torch.nn.Module) -> Iterator[tuple[Any, Angles | str]]:
    rotary = next((x for m in chunk.modules() if (x := getattr(m, "rotary_pos_emb", None)) is not None), None)
    for layer in chunk.modules():
        core = getattr(layer, "core_attention", None)
        if not isinstance(core, AnyCoreAttention) or modelopt.quantizes(core):
            continue
        own = getattr(layer, "rotary_pos_emb", None) or rotary
        without = getattr(layer.config, "no_rope_freq", None)
        if own is not None and not (without and without[layer.layer_number - 1]):
            yield layer, angles_of(layer, own)


class _Watch:
    """Draw one layer's call of a step, and compare its rotation."""

    def __init__(self, layers: dict[Any, Angles | str], steps: Steps) -> None:
        self._layers, self._drawn = layers, Drawn(steps, " rotation")
        self._call: _Call | None = None
        self._armed: set[type] = set()
        for layer in layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            layer.core_attention.register_forward_pre_hook(self._attends, with_kwargs=True)

    def _enter(self, layer: Any, _: Any, named: dict[str, Any]) -> None:
        drawn = self._drawn
        if not drawn.begin(layer.training, self._layers) or layer is not drawn.layer or not drawn.is_due():
            return
        angles = self._layers[layer]
        if isinstance(angles, str):
            self._leave_out(layer, angles)
        else:
            self._call = _Call(layer, angles, drawn.draw)

    def _attends(self, core: AnyCoreAttention, args: Any, named: dict[str, Any]) -> None:
        call = self._call
        if call is None or call.layer.core_attention is not core:
            return
        self._call = None
        call.close()
        given = CALL.bind(core, *args, **named).arguments
        q, packed = given["query"], given.get("packed_seq_params")
        batch = core.micro_batch(packed, q.size(0))
        place = self._drawn.place(batch.cp, core.cp_group, core)
        if len(call.rows) != 2:
            self._leave_out(call.layer, "a rotation fused with the projections")
            return
        if not all(call.fits(x, before) for x, before in zip((q, given["key"]), call.rows, strict=True)):
            self._leave_out(call.layer, "another number of heads than attention")
            return
        with place.booked():
            wrong = call.wrong(batch, q, given["key"], packed)
            everyone = gather_ranks(place.cp.mesh, wrong).tolist()
        kind = type(call.layer)
        if kind not in self._armed and all(rows for rows, *_ in everyone):
            self._leave_out(call.layer, "a rotation of another form")
            return
        self._armed.add(kind)
        found = []
        for rank, (rows, token, error, allowed) in zip(place.ranks, everyone, strict=True):
            if rows:
                found.append(
                    f"rank {rank}: {rows:.0f} of {2 * len(call.at)} rows of q or k, such as token {token:.0f}, off by "
                    f"{error:.1e}, where rounding allows {allowed:.1e}"
                )
        if found:
            raise AttentionError(
                f"--cp-check-every: in step {place.step}, layer {place.layer}, queries or keys are not rotated by "
                f"their positions on the {place.cp.layout.name} layout. {'; '.join(found)}. A table of angles was "
                "overwritten or sliced for another rank, or the rank has its tokens in another order. Resume from an "
                "earlier checkpoint; --cp-check-every 0 checks nothing"
            )

    def _leave_out(self, layer: Any, why: str) -> None:
        """Stop comparing layers of this kind, and say so once."""
        kind = type(layer)
        self._layers = {other: x for other, x in self._layers.items() if type(other) is not kind}
        if not self._layers:
            self._drawn.steps = Steps(1, lambda: -1)
        runtime.print_notice(f"--cp-check-every does not compare RoPE of {kind.__name__}: {why}")


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

    def fits(self, x: Tensor, before: Tensor) -> bool:
        """Whether attention has these rows: MLA rotates one key for all heads, and a part of each."""
        after = _rows(x, self.at)
        same = after.shape[:2] == before.shape[:2] and before.size(2) in (1, after.size(2))
        return same and (self.angles.regrouped or before.size(3) == after.size(3))

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
        found = torch.zeros(4, dtype=torch.float64, device=q.device)
        for before, x in zip(self.rows, (q, k), strict=True):
            after = _rows(x, self.at)[..., -before.size(-1) :].double()
            want, allowed = self.angles.rotated(before, positions)
            beyond = (after - want).abs() - allowed  # NaN, which is not beyond, is for the loss scaling
            worst = beyond.flatten(1).max(1)
            wrong = (beyond > 0).flatten(1).any(1) & compared
            row = worst.values.where(wrong, -torch.inf).argmax()
            error = (after - want).abs().flatten(1)[row, worst.indices[row]]
            limit = allowed.expand_as(after).flatten(1)[row, worst.indices[row]]
            one = torch.stack((tokens_here[row].double(), error, limit))
            found[1:] = torch.where((wrong.any() & (found[0] == 0)), one, found[1:])
            found[0] += wrong.sum()
        return found


def _rows(x: Tensor, at: Sequence[int]) -> Tensor:
    """Some rows ``[n, ..., h, d]`` of ``[s, b, h, d]``, or of a pack's ``[s, h, d]``, whose batch may be kept as 1."""
    rows = x.detach()[list(at)]
    return rows.unsqueeze(1) if rows.dim() == 3 else rows
