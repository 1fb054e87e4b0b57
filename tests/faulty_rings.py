"""Third-party striped rings, each with one fault."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cp_plugin import Attend, Gradients, Options, Partial, Problem, Provider
from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.methods.local import Local
from cp_plugin.engine.methods.ring import STRIPED, Ring


class _OwnBlock(Ring):
    """Attends to no block of another rank in the forward."""

    def forward(self, queries: Any, kv: Any, onto: Any = None) -> Any:
        return self.inner.forward(queries, kv, onto)


@dataclass(frozen=True, slots=True)
class _Faulty:
    inner: Attend
    fault: str

    def forward(self, *args: Any) -> Partial | None:
        if self.fault == "raises":
            raise RuntimeError("planted fault")
        out, lse = self.inner.forward(*args)
        return Partial(out, lse + 0.01 if self.fault == "lse" else lse)

    def backward(self, *args: Any) -> Gradients | None:
        grads = self.inner.backward(*args)
        return grads._replace(dk=grads.dk * torch.nan) if self.fault == "nan" else grads


def faulty(fault: str) -> Provider:
    """``block``: left out; ``window``: ignored; ``lse``: off; ``nan``: in dk; ``raises``."""

    def build(mesh: Mesh, local: Local, problem: Problem, options: Options) -> Attend:
        if fault == "window":
            return Ring(
                mesh, "cp", replace(local, mask=Mask.from_arguments(problem.causal, None, local.mask.documents))
            )
        return _OwnBlock(mesh, "cp", local) if fault == "block" else _Faulty(Ring(mesh, "cp", local), fault)

    return replace(STRIPED, name=f"faulty_{fault}", build=build)
