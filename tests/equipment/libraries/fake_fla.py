"""Fake of flash-linear-attention: recorded parameters, and what its functions require of our calls.

install(patch, reference)     values by the recurrence
install(patch, rounded)       the delta rule as rounded on a GPU: operands of products in half precision, sums and the
                              state between chunks in float32
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from library_signatures import FLA, function, put, recorded
from torch import Tensor

from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.linear import recurrence
from cp_plugin.engine.linear.decayed import edges, times
from cp_plugin.engine.linear.products import scores
from cp_plugin.engine.linear.tokens import Tokens, fold, group_queries, slabs

NEWEST = "0.6.0"
GIVEN = ("q", "k", "v", "g", "beta", "initial_state")
USED = {*GIVEN, "scale", "output_final_state"}
DELTA = {"chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda"}
Body = Callable[[str, dict[str, Tensor | None], bool], tuple[Tensor, Tensor | None]]
"""(function, tensors by name, whether the final state is wanted) -> out and that state."""


def install(patch: pytest.MonkeyPatch, body: Body, version: str = NEWEST) -> None:
    """Put the functions of that version into ``sys.modules``."""
    for package in ("fla", "fla.ops"):
        put(patch, package)
    for package, name in FLA.items():
        parameters = recorded("fla", version, name)
        plain = function(name, parameters, dict)
        defaults = {key: one.default for key, one in signature(plain).parameters.items()}
        checked = function(name, parameters, partial(_checked, name, defaults, body))
        put(patch, f"fla.ops.{package}", **{name: checked})


def _checked(name: str, defaults: dict[str, Any], body: Body, call: dict[str, Any]) -> Any:
    for key, value in call.items():
        assert key in USED or key == "kwargs" or value == defaults[key], f"{name}: {key} is {value}"
    assert not call.get("kwargs") and call["scale"] == 1.0
    tensors = {key: call.get(key) for key in GIVEN}
    q, k, v, g, beta, initial = tensors.values()
    (*rows, d), e = q.shape, v.size(3)
    assert q.shape == k.shape and v.shape == (*rows, e) and q.dtype == k.dtype == v.dtype
    assert all(y is None or y.is_contiguous() for y in tensors.values())
    wide = accumulation_dtype(q.dtype)
    by_key, gated = name in ("chunk_gla", "chunk_kda"), name != "chunk_delta_rule"
    assert gated or g is None
    assert (g is None and not by_key) or (g.shape == ((*rows, d) if by_key else (*rows,)) and g.dtype == wide)
    assert (beta is not None) == (name in DELTA) and (beta is None or beta.shape == (*rows,))
    assert name not in DELTA or (q.dtype != torch.float32 and d <= 256)
    assert d % 2 == 0 and e % 2 == 0, f"{name}: rows of {d} and {e} numbers"
    assert initial is None or (initial.shape == (rows[0], rows[2], d, e) and initial.dtype == wide)
    return body(name, tensors, call["output_final_state"])


def reference(name: str, tensors: dict[str, Tensor | None], wanted: bool) -> tuple[Tensor, Tensor | None]:
    x = _tokens(**tensors)
    out, final = recurrence.run(x, tensors["initial_state"])
    return out.transpose(0, 1).to(x.q.dtype), final if wanted else None


def _tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, **_: Tensor | None) -> Tokens:
    g = None if g is None else g if g.dim() == 4 else g.unsqueeze(3)
    return Tokens(*(None if y is None else y.transpose(0, 1) for y in (q, k, v, g, beta)))


def rounded(name: str, tensors: dict[str, Tensor | None], wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The delta rule in chunks, with the roundings of fla's kernels."""
    q, k, v, _, _, state = tensors.values()
    state = torch.zeros(q.size(0), q.size(2), q.size(3), v.size(3)) if state is None else state
    outs = []
    for chunk in slabs(_tokens(**tensors).each(fold), q.size(0)):
        q32, k32, v32, b32 = (
            group_queries(chunk).float(),
            chunk.k.float(),
            chunk.v.float(),
            chunk.beta.float().unsqueeze(3),
        )
        read, write, factor = edges(chunk)
        pairs = scores(torch.cat((k32.unsqueeze(3), q32), 3), k32 * b32, chunk)
        sides = torch.cat((v32, times(k32, read)), 3).permute(1, 2, 0, 3)
        solved = torch.linalg.solve_triangular(pairs[:, :, 0], sides, upper=False, unitriangular=True)
        u, w = (_half(y) for y in solved.split((v.size(3), k.size(3)), 3))
        new = _half(u - w @ _half(state))
        queries = _half(times(q32.squeeze(3), read)).permute(1, 2, 0, 3)
        outs.append((queries @ _half(state) + _half(pairs[:, :, 1]) @ new).permute(0, 2, 1, 3))
        state = (1 if factor is None else factor.unsqueeze(3)) * state
        state = state + torch.einsum("tbgd,bgte->bgde", _half(times(k32 * b32, write)), new)
    return torch.cat(outs, 1)[:, : q.size(1)].to(q.dtype), state if wanted else None


def _half(x: Tensor) -> Tensor:
    """Rounded; its gradient is not."""
    return x + (x.to(torch.bfloat16).float() - x).detach()
