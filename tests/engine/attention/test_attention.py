"""The ``ContextParallel`` facade: scale, errors, replicated gradients, heads that a provider asks for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import Case, relative_error

import cp_plugin
from cp_plugin import ContextParallel, Problem
from cp_plugin.engine.comm import Mesh, TraceMesh, run_threads
from cp_plugin.testing.launch import run_ranks


def test_scale_and_value_head_size() -> None:
    q, k, v, _ = Case(seq_length=16, heads=2, kv_heads=1, causal=False, v_head_dim=6).inputs()
    out = ContextParallel("ring").attention(q, k, v, causal=False, scale=0.0)
    torch.testing.assert_close(out, v.mean(0, keepdim=True).expand(16, 2, 2, 6))


def test_unshard_takes_the_result_as_replicated() -> None:
    whole = torch.randn(8, 2, 3)

    def rank(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cp = ContextParallel("ring", mesh=mesh, layout="zigzag")
        x = cp.shard(whole, dim=0).movedim(0, -1).detach().requires_grad_()
        y = cp.unshard(x, dim=-1)
        y.backward(whole.movedim(0, -1))
        return y, x.grad, x

    for y, grad, x in run_threads(rank, {"cp": 4}):
        assert torch.equal(y, whole.movedim(0, -1)) and torch.equal(grad, x)


def test_bad_tensors_are_refused() -> None:
    q, cp = torch.zeros(4, 2, 4, 8), ContextParallel("ring")
    with pytest.raises(ValueError, match="multiple of the number of key/value heads"):
        cp.attention(q, q[:, :, :3], q[:, :, :3])
    for change, message in (
        (lambda x: x[:3], "do not match"),
        (lambda x: x[:, :1], "do not match"),
        (lambda x: x[0], r"\[tokens, batch, heads, head size\]"),
        (lambda x: x.double(), "share dtype and device"),
        (lambda x: x.to("meta"), "share dtype and device"),
    ):
        for which in range(3):  # each alone differs from the others
            tensors = [change(q) if which == place else q for place in range(3)]
            with pytest.raises(ValueError, match=message):
                cp.attention(*tensors)
    for sink in (torch.zeros(3), torch.zeros(4, dtype=torch.int64), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"sink must be \[4\], one number per query head"):
            cp.attention(q, q, q, sink=sink)
    with pytest.raises(ValueError, match=r"window \(-2, 0\): give two numbers of tokens, before and after"):
        cp.attention(q, q, q, window=(-2, 0))
    with pytest.raises(ValueError, match="multiple of 8"):
        ContextParallel("ring", mesh=TraceMesh({"cp": 4}, 0), layout="zigzag").shard(torch.zeros(12))


def test_the_public_names_are_frozen() -> None:
    names = "Attend ContextParallel Gradients KeyValues Options Partial Problem Provider Queries Tree"
    assert sorted(cp_plugin.__all__) == names.split()


def test_usp_asks_for_the_heads() -> None:
    def rank() -> None:
        with pytest.raises(ValueError, match=r"^provider='usp' divides.*problem=Problem\(size=4, heads=\.\.\., kv"):
            ContextParallel("usp", group=dist.group.WORLD)
        case = Case(seq_length=32, heads=8, kv_heads=2, causal=True)
        cp = ContextParallel("usp", group=dist.group.WORLD, problem=Problem(size=4, heads=8, kv_heads=2))
        q, k, v, _ = (cp.shard(x) for x in case.inputs())
        assert relative_error(cp.unshard(cp.attention(q, k, v)), case.reference().out) < 1e-12
        assert cp.options.head_parallel == 2
        odd = torch.zeros(8, 1, 3, 8)
        with pytest.raises(ValueError, match=r"3 query and.*cannot be split across 2 ranks"):
            cp.attention(odd, odd, odd)

    run_ranks(rank, 4, init_process_group=True)


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), 4, "4,0", [4, 0], (4,), (4.0, 0), True])
@pytest.mark.parametrize("name", ["scale", "window", "cu_seqlens"])
def test_arguments_of_another_type(name: str, value: object) -> None:
    """Refused by name, neither computed nor an error of what receives them."""
    if name == "scale" and isinstance(value, int):
        return
    x = torch.randn(8, 1, 2, 4)
    with pytest.raises(ValueError, match=f"^{name}"):
        ContextParallel("ring").attention(x, x, x, **{name: value})
    if name == "scale":
        with pytest.raises(ValueError, match=r"^scale"):
            ContextParallel("lasp2").linear_attention(x, x, x, scale=value)


@pytest.mark.parametrize("provider", [None, 5, "RING"])
def test_provider_of_another_type(provider: object) -> None:
    with pytest.raises(ValueError, match=r"^provider="):
        ContextParallel(provider)
