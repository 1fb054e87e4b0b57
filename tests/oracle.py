"""The tests' oracle: attention on one device in float64 by torch's autograd, and how results are compared.

It shares no code with the package: key/value heads are repeated, the mask is built from positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Result(NamedTuple):
    """Output and gradients, whole sequences ``[S, b, heads, d]``."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Random inputs of one attention problem, the same for every rank and provider."""

    seq_length: int
    heads: int
    kv_heads: int
    causal: bool
    dtype: torch.dtype = torch.float64
    batch: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    window: tuple[int, int] | None = None
    documents: tuple[int, ...] = ()
    """Bounds, from 0 to the length of the sequence."""
    tree: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Instead: lengths of nodes in depth-first order, and each one's parent, -1 for none."""
    sink: bool = False
    softcap: float | None = None
    seed: int = 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout in this case's dtype."""
        g = torch.Generator().manual_seed(self.seed)
        shapes = ((self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim))
        q, k, v = (torch.randn(self.seq_length, self.batch, *s, generator=g, dtype=torch.float64) for s in shapes)
        dout = torch.randn(self.seq_length, self.batch, self.heads, self.v_head_dim, generator=g, dtype=torch.float64)
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), dout.to(self.dtype)

    def sinks(self) -> Tensor | None:
        """A score per query head, of the size of a row's log-sum-exp."""
        return torch.linspace(-2, 4, self.heads, dtype=torch.float64) if self.sink else None

    def hidden(self) -> Tensor:
        """bool ``[query, key]``."""
        at = torch.arange(self.seq_length)
        before, after = (None if n == -1 else n for n in self.window or (-1, -1))
        hidden = ~sees(at, at, before, 0 if self.causal else after, self.documents)
        return hidden if not self.tree[0] else hidden | ~self._ancestors()

    def _ancestors(self) -> Tensor:
        """bool ``[query, key]``: whether the key's node is the query's or an ancestor."""
        lengths, parents = self.tree
        above = torch.eye(len(lengths), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                above[node] |= above[parent]
        node_of = torch.repeat_interleave(torch.tensor(lengths))
        return above[node_of][:, node_of]

    def reference(self) -> Result:
        """The float64 answer for the inputs rounded to this case's dtype."""
        *inputs, dout = (x.double() for x in self.inputs())
        sink = self.sinks()
        leaves = [x.requires_grad_() for x in (*inputs, sink) if x is not None]
        out = self.outputs(*inputs, sink, softcap=self.softcap)
        return Result(out.detach(), *torch.autograd.grad(out, leaves, dout))

    def outputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention under this case's mask; scale: of the scores, by default 1 / sqrt(d)."""
        return attend(q, k, v, self.hidden(), q.size(3) ** -0.5 if scale is None else scale, sink, softcap)[0]


def sees(
    q: Tensor,
    k: Tensor,
    before: int | None,
    after: int | None,
    documents: Sequence[int] = (),
    stops: Sequence[int] = (),
) -> Tensor:
    """bool ``[query, key]``, of positions.

    Args:
        before, after: the window, None for no end.
        documents: their bounds.
        stops: instead of its document's end the last query that sees a key, by document.
    """
    ahead = k - q[:, None]
    left, right = (torch.inf if n is None else n for n in (before, after))
    visible = (-ahead <= left) & (ahead <= right)
    if not documents:
        return visible
    of_q, of_k = (torch.bucketize(x, torch.tensor(documents), right=True) for x in (q, k))
    return visible & (of_q[:, None] == of_k if not stops else q[:, None] < torch.tensor(stops)[of_k - 1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    scale: float,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp ``[s, b, heads]`` of any queries and keys; 0 and -inf where a query sees nothing."""
    repeat = q.size(2) // k.size(2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(repeat, 2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()[..., : k.size(0)]
    return torch.einsum("bhqk,kbhe->qbhe", weights, v.repeat_interleave(repeat, 2)), lse.permute(2, 0, 1)


def attend_to_slots(
    q: Tensor, k: Tensor, v: Tensor, held: Tensor, positions: Tensor, scale: float, left: int = -1, **cap: float
) -> tuple[Tensor, Tensor]:
    """In float64, of a cache: held are the positions of its slots, by sequence; left: of the window, -1 for no end."""
    sequences = []
    for i in range(q.size(1)):
        apart = positions[:, i, None] - held[:, i].long()
        hidden = (apart < 0) | ((apart > left) & (left != -1))
        sequences.append(attend(*(x[:, i : i + 1].double() for x in (q, k, v)), hidden, scale, **cap))
    outs, lses = zip(*sequences, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; infinite if ``got`` is not finite."""
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return error if error == error else float("inf")


def assert_close(got: Result, want: Result, limits: Result | float, what: object) -> None:
    """Require every field to be within its relative error limit."""
    for i, name in enumerate(Result._fields[: len(want) - (want.dsink is None)]):
        limit = limits if isinstance(limits, float) else float(limits[i])
        assert got[i].shape == want[i].shape, f"{what}: {name} has shape {got[i].shape}, not {want[i].shape}"
        error = relative_error(got[i], want[i])
        assert error <= limit, f"{what}: {name} is off by {error:.2e}, allowed {limit:.2e}"


def errors(got: Result, want: Result) -> list[float]:
    """Return the relative error of each field."""
    return [relative_error(a, b) for a, b in zip(got, want, strict=True) if b is not None]


def no_sums_in_half(dtype: torch.dtype, *, added: bool = True) -> AbstractContextManager[object]:
    """Where the inputs are in half precision, AssertionError for a sum, or a function before it, that is, too.

    added: also where two parts are added, and not only along a dimension.
    """
    return _Wide(_SUMS + _ADDED * added) if dtype.itemsize == 2 else nullcontext()


_SUMS = ("sum", "cumsum", "mean", "logsumexp", "exp", "log_sigmoid_forward", "softplus")
_ADDED = ("add", "add_", "sub", "sub_", "index_add_")


class _Wide(TorchDispatchMode):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        first = result[0] if isinstance(result, tuple) and result else result
        assert name not in self._names or first.numel() < 2 or first.dtype.itemsize > 2, f"{name} in {first.dtype}"
        return result
