"""torch.compile calls attention without tracing into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import cp_plugin
from cp_plugin import ContextParallel


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_compile_does_not_trace_into_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame, reset

    looked_into = set()
    look = convert_frame.ConvertFrame.__call__

    def seen(self, frame, *args, **named):
        looked_into.add(Path(frame.f_code.co_filename))
        return look(self, frame, *args, **named)

    monkeypatch.setattr(convert_frame.ConvertFrame, "__call__", seen)
    # With torch 2.10 this stays True after dispatch modes that ended in several threads, and then nothing is compiled.
    inside = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(torch.utils._python_dispatch, inside, False, raising=False)
    cp = ContextParallel("ring" if kind == "softmax" else "lasp2")
    q, k, v = (torch.randn(16, 1, 2, 8, requires_grad=True) for _ in range(3))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = cp.attention if kind == "softmax" else cp.linear_attention
        return attend(q * 2, k, v) + 1

    reset()
    out = torch.compile(layer, backend="eager")(q, k, v)
    reset()
    assert Path(__file__) in looked_into
    package = Path(cp_plugin.__file__).parent
    assert {path.relative_to(package).as_posix() for path in looked_into if package in path.parents} <= {
        "common/eager.py"
    }
    assert torch.equal(out, layer(q, k, v))
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(map(torch.equal, got, torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))))
