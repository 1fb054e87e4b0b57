"""Which experts each token gets in the step of the start-up check: those of the first step in all others.

Near a tie, rounding would choose others, which is no difference in how ranks train.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.comm.every_rank import gather_objects
from cp_plugin.core.layout import Layout
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches import patching
from cp_plugin.placement.documents import DOCUMENTS

_topk = torch.topk


class Choices:
    """Experts as routers chose them in one step, by token: in other steps, rounding errors could choose others.

    Each step chooses where documents place tokens, and in packs of several rows, which Megatron divides for experts. A
    choice is replayed only as far as it is one: what is better by more than rounding is a difference.
    """

    def __init__(self, config: Any, layout: Layout, padded: int, tokens: int, rows: int) -> None:
        """
        Args:
            config: the model's.
            layout: of tokens between the layers.
            padded, tokens: lengths of the sequences, with padding and without.
            rows: of a micro-batch.
        """
        packs = rows if runtime.packs() else 1
        free = layout.name == DOCUMENTS.name or packs > 1
        self._experts = bool(getattr(config, "num_moe_experts", None)) and not free
        cp, rank = (getattr(parallel_state, f"get_context_parallel_{what}")() for what in ("world_size", "rank"))
        parts = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        part = parallel_state.get_tensor_model_parallel_rank() if parts > 1 else 0
        if self._experts:
            self._mine = layout.positions(padded, cp, rank).chunk(parts)[part]
            self._alone = torch.arange(tokens).chunk(parts)[part]
        self._chosen: list[Tensor] = []  # this rank's, [tokens * b, k]
        self._of_all: list[Tensor] = []  # [whole sequence, b, k]
        self.apart = 0.0
        """By how much the best experts' scores are above those of the replayed ones, relative to the largest score."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the block, note choices; at its end tell them to all tensor- and context-parallel ranks, collective."""

        def topk(scores: Tensor, k: int, *args: Any, **named: Any) -> Any:
            found = _topk(scores, k, *args, **named)
            if self._routes(scores, self._mine, *args, **named):
                self._chosen.append(found[1].detach())
            return found

        if not self._experts:
            yield
            return
        with patching.lent(torch, topk=topk):
            yield
        group = parallel_state.get_tensor_and_context_parallel_group()
        parts = gather_objects((self._mine, [one.cpu() for one in self._chosen]), group)
        shapes = {tuple(tuple(one.shape) for one in chosen) for _, chosen in parts}
        if len(shapes) > 1:
            return
        for number, one in enumerate(self._chosen):
            rows = one.size(0) // len(self._mine)
            whole = one.new_zeros(max(int(where.max()) for where, _ in parts) + 1, rows, one.size(1))
            for where, chosen in parts:
                whole[where.to(one.device)] = chosen[number].to(one.device).view(len(where), *whole.shape[1:])
            self._of_all.append(whole)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """In the block, a rank that has whole sequences chooses as recorded."""
        left = iter(self._of_all)

        def topk(scores: Tensor, k: int, *args: Any, **named: Any) -> Any:
            best = _topk(scores, k, *args, **named)
            whole = next(left, None) if self._routes(scores, self._alone, *args, **named) else None
            if whole is None or whole.numel() * len(self._alone) != best[1].numel() * len(whole):
                return best
            chosen = whole[self._alone.to(whole.device)].flatten(0, 1)
            values = scores.gather(1, chosen)
            above = best[0].sort(1)[0] - values.sort(1)[0]
            self.apart = max(self.apart, float(above.max() / scores.abs().max().clamp(min=1e-30)))
            return torch.return_types.topk((values, chosen))

        with patching.lent(torch, topk=topk) if self._experts else nullcontext():
            yield

    @staticmethod
    def _routes(scores: Tensor, tokens: Tensor, dim: int = -1, *_: Any, **__: Any) -> bool:
        """Whether something is chosen for each token: experts, or groups of them."""
        return scores.dim() == 2 and scores.size(0) % len(tokens) == 0 and dim in (1, -1)
