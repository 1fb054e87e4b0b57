"""The tables of the page on kernels: how many calls the methods make, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem, providers
from cp_plugin.backends.sdpa import Sdpa
from cp_plugin.blocks import Block, Tiled
from cp_plugin.layout import sort_positions
from cp_plugin.local import Local
from cp_plugin.mask import CAUSAL
from cp_plugin.memory import peaks
from cp_plugin.mesh import TraceMesh
from cp_plugin.moves import nothing_seen
from cp_plugin.protocol import Gradients, Partial, own
from cp_plugin.setups import settled
from cp_plugin.text import in_bytes


@dataclass
class _Counted:
    """A ``BlockKernel`` that computes nothing, and counts what a library's kernel would be called for."""

    tiles: list[int] = field(default_factory=list)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, onto: Partial | None
    ) -> Partial | None:
        rows, keys = (sort_positions(segments, torch.device("cpu"))[0] for segments in (block.rows, block.keys))
        found = Tiled(Sdpa()).tiles(Block(rows, keys, block.mask))
        self.tiles += [len(found)] if found else []
        return nothing_seen(q, v)

    def backward(self, *_: object) -> Gradients | None:
        return None


def calls_table() -> str:
    """Per provider and layout: kernel calls of the forward of a middle rank of 8, for each group of heads."""
    rows = []
    for name in providers.names():
        for layout in providers.get(name).layouts:
            tiles = _tiles(name, layout)
            one, more = sum(n == 1 for n in tiles), sum(n > 1 for n in tiles)
            rows.append(f"| `{name}` | {layout} | {len(tiles)} | {sum(tiles)} | {one} | {more} |")
    head = "| provider | tokens | blocks | calls of a library's kernel | `auto`: a library's | `auto`: ours |"
    return "\n".join([head, "|---" * 6 + "|", *rows])


def _tiles(name: str, layout: str) -> list[int]:
    """Of every block: what it is cut into."""
    problem = Problem(size=8, heads=8, kv_heads=8, head_dim=8, seq_length=8 * 64)
    grouped = "head_groups" in providers.get(name).options
    options = Options(layout=layout, head_groups=1 if grouped else None)
    settled = providers.settle(name, problem, options)
    mesh = TraceMesh(settled.provider.axes(8, settled.options), 5)
    cp = ContextParallel(name, mesh=mesh, problem=problem, layout=layout, **options.chosen)
    counted = _Counted()
    segments = partial(cp.segments, problem.seq_length)
    local = Local(kernel=counted, segments=segments, keys=segments, mask=CAUSAL, scale=1.0)
    q = torch.empty(64, 1, 8, 8, dtype=problem.dtype, device="meta")
    settled.provider.build(mesh, local, problem, settled.options).forward(q, q, q, own, own)
    return counted.tiles


def memory_table() -> str:
    """Per provider: what one attention call makes beside its inputs, on 8 and 64 ranks."""
    rows = []
    for name in providers.names():
        cells = []
        for size in (8, 64):
            problem = Problem(size=size, heads=64, kv_heads=64, head_dim=128, seq_length=2**20)
            try:
                found = peaks(name, problem, Options(), index=size - 1)
            except ValueError:
                cells += ["cannot", "cannot"]
                continue
            cells += [in_bytes(found.forward), in_bytes(found.backward)]
        own = settled(providers.get(name), replace(problem, hosts=_HOSTS), Options())
        rows.append(f"| `{name}` | {' | '.join(cells)} | {own.communicators} |")
    head = "| provider | 8 ranks: forward | backward | 64 ranks: forward | backward | communicators |"
    return "\n".join([head, "|---" * 6 + "|", *rows])


_HOSTS = tuple(f"node{rank // 8}" for rank in range(64))
