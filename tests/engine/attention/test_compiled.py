"""A layer with every public call, compiled: also for other lengths, and with nothing of ours traced.

Numbers and gradients in every wrapper, also compiled: ``test_fuzz_calls``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import cp_plugin
from cp_plugin import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.attention.shift import shift


def test_many_calls_in_a_compiled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is traced but their common wrapper, and that not anew for each kind of call, up to torch's limit."""
    from torch._dynamo import convert_frame

    looked_into, look = set(), convert_frame.ConvertFrame.__call__

    def seen(self, frame, *args, **named):
        looked_into.add(Path(frame.f_code.co_filename))
        return look(self, frame, *args, **named)

    monkeypatch.setattr(convert_frame.ConvertFrame, "__call__", seen)
    # With torch 2.10 this stays True after dispatch modes that ended in several threads, and then nothing is compiled.
    inside = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(torch.utils._python_dispatch, inside, False, raising=False)

    def layer(x: Tensor) -> Tensor:
        for settings in ({}, {"causal": False}, {"scale": 0.3}, {"causal": False, "scale": 0.3}):
            x = softmax.attention(x, x, x, **settings).sin() + linear.linear_attention(x, x, v=x, **settings).cos()
        x = short_convolution(linear, x.flatten(2), x[0, 0].reshape(16, 1)).view_as(x)
        x = shift(softmax, x) + shift(softmax, x, by=2)
        return softmax.shard(softmax.unshard(x)) * softmax.positions(len(x)).view(-1, 1, 1, 1)

    softmax, linear = ContextParallel("ring"), ContextParallel("lasp2")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    for tokens in (16, 24, 40):  # from the second length on, sizes are symbolic
        x = torch.randn(tokens, 1, 2, 8, requires_grad=True)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            out = compiled(x)
        (got,), (want,) = (torch.autograd.grad(y.sum(), x) for y in (out, layer(x)))
        assert torch.equal(out, layer(x)) and torch.equal(got, want)
    torch._dynamo.reset()
    package = Path(cp_plugin.__file__).parent
    ours = {path.relative_to(package).as_posix() for path in looked_into if package in path.parents}
    assert Path(__file__) in looked_into and ours <= {"engine/common/eager.py"}, ours
