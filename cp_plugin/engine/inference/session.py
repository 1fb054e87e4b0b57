"""A batch of sequences that all ranks generate together: prefill by a provider, then decode.

    session = Session(cp, batch=1, capacity=slots_for(context, cp.size, 2), group=group)
    with session.prefill(tokens):                            # once, or chunk by chunk
        out = session.attend(layer, q, k, v)                 # this rank's tokens, as in ContextParallel.attention
    session.close(lengths)
    with session.decode(1):
        out = session.attend(layer, q, k, v)                 # the next token, the same on every rank

Prefill sends what the provider's forward sends; decode sends one small message per layer, along a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.attention import agreement, softmax
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.inputs import check_numbers
from cp_plugin.engine.comm import GroupMesh, Mesh
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Window
from cp_plugin.engine.core.values import Owners, Partial, dense
from cp_plugin.engine.inference import store, tree
from cp_plugin.engine.inference.slots import Chunk, Dealt, Slots
from cp_plugin.engine.inference.store import Cache, Latent
from cp_plugin.engine.methods.moves import peel


class Session:
    """The KV cache of all layers, sharded over the context-parallel ranks."""

    def __init__(
        self,
        cp: ContextParallel,
        *,
        batch: int,
        capacity: int,
        group: dist.ProcessGroup | None = None,
        mesh: Mesh | None = None,
        fp8: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            cp: what prefill attends with, softmax attention.
            batch: sequences.
            capacity: slots per rank; a context of up to ``capacity * cp.size`` tokens fits.
            group: ``cp``'s process group; None is a single rank.
            mesh: instead of a group, a mesh of the one axis ``cp``.
            fp8: keep keys and values in one byte an element.
            device: of the model; None: the CPU.

        Raises:
            ValueError: for sizes below 1, or a group of another size.
        """
        if mesh is None:
            mesh = GroupMesh({tree.AXIS: cp.size}, {tree.AXIS: group}, cp.index, cp.mesh.ledger)
        if mesh.axes != {tree.AXIS: cp.size}:
            raise ValueError(f"decode needs the one axis cp of {cp.size} ranks, got {mesh.axes}")
        self.cp, self.mesh, self.fp8 = cp, mesh, fp8
        self.device = torch.device("cpu") if device is None else device
        self.slots = Slots(cp.size, cp.index, batch, capacity, self.device)
        self._layers: dict[Hashable, Cache] = {}
        self.step: Chunk | Dealt | None = None  # of prefill or decode

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence so far."""
        return self.slots.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's cache, over all layers."""
        return sum(cache.nbytes for cache in self._layers.values())

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[Chunk]:
        """Inside the block, ``attend`` takes this rank's part of the prompt's next ``tokens``, in ``cp``'s layout.

        ValueError for a length that the layout cannot divide, or after ``close``; CacheFullError if they do not fit.
        """
        chunk = self.slots.chunk(
            tokens, lambda rank: self.cp.layout.segments(tokens, self.cp.size, self.cp.numbers[rank])
        )
        with self._running(chunk), self.cp.mesh.ledger.phase("prefill"), self.mesh.ledger.phase("prefill"):
            yield chunk

    def close(self, lengths: Sequence[int]) -> None:
        """The prompt is complete; tokens of sequence i from ``lengths[i]`` on were padding."""
        self.slots.close(lengths)

    @contextmanager
    def decode(self, tokens: int = 1) -> Iterator[Dealt]:
        """Inside the block, ``attend`` takes the next ``tokens`` of each sequence, the same on every rank.

        ValueError before ``close``; CacheFullError if they do not fit.
        """
        dealt = self.slots.deal(tokens)
        with self._running(dealt), self.mesh.ledger.phase("decode"):
            yield dealt

    def attend(
        self,
        layer: Hashable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        sink: Tensor | None = None,
        latent: Latent | None = None,
    ) -> Tensor:
        """Keep these keys and values, and attend to all so far, causal.

        Args:
            layer: the layer's key.
            q: ``[s, b, h, d]``; k: ``[s, b, g, d]``; v: ``[s, b, g, e]``: this rank's tokens in prefill, all tokens in
                decode.
            scale, softcap, window, sink: as in ``ContextParallel.attention``.
            latent: for multi-latent attention, what k and v were made of; kept instead of them.

        Returns:
            ``[s, b, h, e]`` in q's dtype, not differentiable.

        Raises:
            ValueError: outside of a step, for other shapes, or a problem that the provider does not support.
        """
        with agreement.compare_call(self.cp, "attend", (q, k, v, sink)) as settings:
            if self.step is None:
                raise ValueError("attend() is for use inside `with session.prefill(...)` or `with session.decode(...)`")
            prefill = isinstance(self.step, Chunk)
            tokens = self.step.stop - self.step.first if prefill else self.step.positions.size(0)
            check_numbers(scale, window, softcap)
            if self.cp.provider.kind != "softmax":
                raise ValueError(
                    f"provider {self.cp.provider.name!r} is for linear attention, which keeps a state and no keys: use "
                    "ContextParallel.extend_linear"
                )
            self.cp.problem(q, k, v, causal=True)
            if q.shape[:2] != (tokens, self.slots.batch):
                raise ValueError(
                    f"this step expects q, k, v of {tokens} tokens of {self.slots.batch} sequences, got q "
                    f"{tuple(q.shape)}"
                )
            settings |= {"scale": scale, "softcap": softcap, "window": window, "documents": tuple(self.lengths)}
        q, k, v = map(dense, (q, k, v))
        kept, v_head_dim = ((k, v), v.size(3)) if latent is None else ((latent.rows,), latent.up_v.size(2))
        if layer not in self._layers:
            self._layers[layer] = Cache(self.slots.capacity, v_head_dim, *kept, fp8=self.fp8)
        cache, scores = self._layers[layer], Scores.from_call(q, scale, softcap)
        if isinstance(self.step, Chunk):
            cache.put(slice(self.step.first, self.step.stop), *kept)
            k, v = cache.get(0, self.step.stop)
            k, v = (k, v) if latent is None else latent.heads(k)
            return self._prefill(self.step, q, k, v, scores, window, sink)
        tokens, sequences = self.step.tokens, self.step.sequences
        cache.put((self.step.slots, sequences), *(x[tokens, sequences] for x in kept))
        held = self.slots.positions[: self.step.used]
        queries = q if latent is None else latent.queries(q)
        out, lse = store.attend(queries, cache, held, self.step.positions, scores, window)
        out, lse = tree.merged(self.mesh, Partial(out if latent is None else latent.outputs(out), lse))
        if sink is not None:
            out, lse = softmax.apply_sink(out, lse, sink)
        return out.to(q.dtype)

    def _prefill(
        self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: Window | None, sink: Tensor | None
    ) -> Tensor:
        """This rank's queries of a chunk over all keys so far, by the provider."""
        problem = self.cp.problem(q, k[chunk.first :], v[chunk.first :], causal=True)
        problem = replace(problem, window=window, sink=sink is not None, softcap=scores.softcap is not None)
        problem = problem.with_transport(block=gcd(q.size(0), k.size(0), 64))
        self.cp.refuse(problem)
        method = self.cp.method(
            problem, q.device, scores, segments=self._positions(chunk.rows), keys=self._positions(chunk.keys)
        )
        return softmax.attend(q, k, v, sink, *peel(method)).home

    def _positions(self, of_ranks: Sequence[Segments]) -> Callable[[Owners], Segments]:
        def segments(owners: Owners) -> Segments:
            return tuple(s for rank in owners(self.cp.index) for s in of_ranks[rank])

        return segments

    @contextmanager
    def _running(self, step: Chunk | Dealt) -> Iterator[None]:
        self.step = step
        try:
            yield
        finally:
            self.step = None
