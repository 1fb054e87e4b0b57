"""Rows without a finite score in one tile, on CUDA kernels: their results, and that merging keeps the other tile.

torch's operators are replaced by functions with their schemas that compute with the reference.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_tiles import OnCuda
from oracle import Case
from torch import Tensor

from cp_plugin.core.block import Scores
from cp_plugin.core.values import Partial
from cp_plugin.kernels.backends import Backend, cudnn, sdpa
from cp_plugin.kernels.backends.cudnn import Cudnn
from cp_plugin.kernels.backends.reference import Reference
from cp_plugin.kernels.backends.sdpa import Sdpa
from cp_plugin.kernels.merge import merge


def operator(name: str, blind: float) -> Any:
    """Replaces ``aten::name``; blind: its log-sum-exp of a row without a finite score."""
    schema = getattr(torch.ops.aten, name).default._schema

    def call(*args: Any, **named: Any) -> tuple[Any, ...]:
        given = dict(zip((a.name for a in schema.arguments if not a.kwarg_only), args, strict=False)) | named
        q, k, v = (given[n].permute(2, 0, 1, 3) for n in ("query", "key", "value"))
        diagonal = 0 if given["is_causal"] else k.size(0) - 1
        out, lse = Reference().forward(q, k, v, diagonal, Scores(given["scale"]))
        lse = lse.masked_fill(lse == -torch.inf, blind).permute(1, 2, 0).contiguous()
        lse = lse.unsqueeze(-1) if "cudnn" in name else lse
        return (out.permute(1, 2, 0, 3), lse, *[None] * (len(schema.returns) - 2))

    return call


KERNELS: dict[str, tuple[Backend, Any, str, float]] = {
    "sdpa": (Sdpa(), sdpa, "_scaled_dot_product_flash_attention", torch.inf),
    "cudnn": (Cudnn(), cudnn, "_scaled_dot_product_cudnn_attention", -torch.inf),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_blind_row_of_one_tile_leaves_the_other_tiles_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, causal: bool
) -> None:
    backend, module, op, blind = KERNELS[name]
    monkeypatch.setattr(module, "_aten", SimpleNamespace(**{op: operator(op, blind)}))
    q, k, v, _ = Case(seq_length=8, heads=2, kv_heads=1, causal=causal, dtype=torch.bfloat16).inputs()
    q[..., 0], unseen = q[..., 0].abs() + 1, k.clone()
    unseen[: 3 if causal else 8, ..., 0] = -torch.inf
    blind_rows = 3 if causal else 8
    diagonal = 0 if causal else 7
    on_gpu = [x.as_subclass(OnCuda) for x in (q, unseen, v)]
    part = Partial(*(x.as_subclass(Tensor) for x in backend.forward(*on_gpu, diagonal, Scores(0.5))))
    assert part.lse.isneginf().all(-1).all(-1).tolist() == [True] * blind_rows + [False] * (8 - blind_rows)
    other = Reference().forward(q, k, v, 7, Scores(0.5))
    merged = merge(Partial(*(x.float() for x in other)), Partial(part.out.float(), part.lse.float()))
    assert merged is not None and not merged.out.isnan().any()
    torch.testing.assert_close(merged.out[:blind_rows], other[0][:blind_rows].float())
    torch.testing.assert_close(merged.lse[:blind_rows], other[1][:blind_rows])


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_that_is_blind_in_some_heads_only(causal: bool) -> None:
    """torch's CPU kernel, whose log-sum-exp is repaired; a true 0 stays."""
    q, k, v, _ = Case(seq_length=8, heads=4, kv_heads=2, causal=causal, dtype=torch.float64).inputs()
    q[..., 0] = q[..., 0].abs() + 1
    k[: 3 if causal else 8, :, 0, 0] = -torch.inf
    q[0, 0, 2:] = k[0, 0, 1] = 0  # the one score that the row sees under a causal mask
    found, want = (backend.forward(q, k, v, 0 if causal else 7, Scores(0.5)) for backend in (Sdpa(), Reference()))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert want[1].isneginf().any(0).any(0).tolist() == [True, True, False, False]


def test_only_infinity_changes_its_sign() -> None:
    lse = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, -3e38])
    want = torch.tensor([1.0, -torch.inf, -torch.inf, torch.nan, -3e38])
    torch.testing.assert_close(sdpa.minus_infinity(lse), want, rtol=0, atol=0, equal_nan=True)
