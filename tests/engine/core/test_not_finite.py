"""NaN and infinity in q, k, v propagate as on one device: no merge hides or spreads them.

A kernel may spread them itself, since it multiplies masked keys by zero and 0 * NaN is NaN. So the bounds are the
definition of attention (a row sees its own keys only) and one call of the same kernel on one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from nightly import pairs_at_night
from oracle import Case, Result
from thread_ranks import run, run_on_threads
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.methods import registry as providers

PLACES = {"first token": 0, "middle": 29, "last token": 63}
FAULTS = {
    "NaN in q": (0, math.nan),
    "NaN in k": (1, math.nan),
    "NaN in v": (2, math.nan),
    "infinity in v": (2, math.inf),
    "minus infinity in v": (2, -math.inf),
    "infinity in k": (1, math.inf),
    "infinity in q": (0, math.inf),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty(Case):
    """One number of one input is not finite."""

    fault: str
    token: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        which, value = FAULTS[self.fault]
        tensors = Case.inputs(self)
        tensors[which][self.token, 0, 1, 3] = value
        return tensors


def attend_by_definition(case: Case) -> Result:
    """Row by row over the visible keys, so that no masked key takes part."""
    q, k, v, dout = (x[:, 0] for x in case.inputs())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    rows = []
    for i in range(case.seq_length):
        scores = torch.einsum("hd,khd->hk", q[i], k[: i + 1]) * case.head_dim**-0.5
        rows.append(torch.einsum("hk,khe->he", scores.softmax(-1), v[: i + 1]))
    out = torch.stack(rows)
    out.backward(dout)
    return Result(*(x.unsqueeze(1) for x in (out.detach(), q.grad, k.grad, v.grad)))


@pairs_at_night
@pytest.mark.parametrize(("backend", "token"), [*(("sdpa", place) for place in PLACES), ("reference", "middle")])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("provider", providers.names())
def test_as_on_one_device(backend: str, provider: str, fault: str, token: str) -> None:
    sizes = {"seq_length": 64, "heads": 4, "kv_heads": 4, "causal": True, "batch": 1}
    case = Faulty(fault=fault, token=PLACES[token], **sizes)
    exact, single = attend_by_definition(case), run(ContextParallel("ring", backend=backend), case)
    got = run_on_threads(provider, 4, case, backend=backend)[0]
    assert not all(x.isfinite().all() for x in exact[:4])
    for name, g, e, s in zip(Result._fields[:4], got, exact, single, strict=False):
        hidden = ~e.isfinite() & ~s.isfinite() & g.isfinite()
        assert not hidden.any(), f"{name}: {hidden.sum()} numbers that are not finite by definition came out finite"
        clean = e.isfinite() & s.isfinite()
        spread = clean & ~g.isfinite()
        assert not spread.any(), f"{name}: {spread.sum()} numbers that are finite on one device came out not finite"
        torch.testing.assert_close(g[clean], e[clean], rtol=1e-9, atol=1e-12)
