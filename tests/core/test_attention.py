"""The facade: shapes, errors, replicated gradients, one rank without a process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import Case, relative_error

import cp_plugin
from cp_plugin import ContextParallel
from cp_plugin.comm import Mesh, TraceMesh, run_threads
from cp_plugin.testing.launch import run_ranks


def test_one_rank_needs_no_process_group() -> None:
    case = Case(seq_length=33, heads=4, kv_heads=2, causal=True)
    q, k, v, _ = case.inputs()
    for provider in ("ring", "striped"):
        cp = ContextParallel(provider)
        assert cp.size == 1 and torch.equal(cp.positions(33), torch.arange(33))
        assert relative_error(cp.unshard(cp.attention(cp.shard(q), k, v)), case.reference().out) < 1e-12


def test_scale_and_value_head_size() -> None:
    q, k, v, _ = Case(seq_length=16, heads=2, kv_heads=1, causal=False, v_head_dim=6).inputs()
    out = ContextParallel("ring").attention(q, k, v, causal=False, scale=0.0)
    torch.testing.assert_close(out, v.mean(0, keepdim=True).expand(16, 2, 2, 6))


def test_sequences_of_several_lengths_have_positions_of_their_own() -> None:
    def rank(mesh: Mesh) -> list[float]:
        cp, found = ContextParallel("ring", mesh=mesh, layout="zigzag"), []
        for length in (16, 32, 16):
            case = Case(seq_length=length, heads=2, kv_heads=1, causal=True)
            out = cp.attention(*(cp.shard(x) for x in case.inputs()[:3]))
            found.append(relative_error(cp.unshard(out), case.reference().out))
        return found

    assert max(map(max, run_threads(rank, {"cp": 2}))) < 1e-12


def test_attention_is_differentiable_by_gradcheck() -> None:
    q, k, v, _ = Case(seq_length=6, heads=2, kv_heads=1, causal=True, head_dim=3, v_head_dim=3, batch=1).inputs()
    cp = ContextParallel("striped", backend="reference")
    assert torch.autograd.gradcheck(lambda *x: cp.attention(*x), [x.requires_grad_() for x in (q, k, v)])


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


def test_recomputation_under_checkpoint_gives_the_same_gradients() -> None:
    case = Case(seq_length=32, heads=4, kv_heads=2, causal=True)
    want = case.reference()

    def rank(mesh: Mesh) -> torch.Tensor:
        cp = ContextParallel("striped", mesh=mesh)
        q, k, v, dout = (cp.shard(x) for x in case.inputs())
        q = q.detach().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(cp.attention, q, k, v, use_reentrant=False)
        out.backward(dout)
        return cp.unshard(q.grad)

    for dq in run_threads(rank, {"cp": 2}):
        assert relative_error(dq, want.dq) < 1e-12


def test_bad_input_is_refused_with_the_fix() -> None:
    q = torch.zeros(4, 1, 4, 8)
    cp = ContextParallel("ring")
    with pytest.raises(ValueError, match=r"unknown provider 'rign'.*ring, striped"):
        ContextParallel("rign")
    with pytest.raises(ValueError, match=r"'striped' does not run on the zigzag layout.*--cp-layout.*striped"):
        ContextParallel("striped", layout="zigzag")
    with pytest.raises(ValueError, match="unknown layout"):
        ContextParallel("ring", layout="diagonal")
    with pytest.raises(ValueError, match="unknown backend"):
        ContextParallel("ring", backend="magic")
    with pytest.raises(ValueError, match=r"needs the mesh axes \{'cp': 4\}"):
        ContextParallel("ring", mesh=TraceMesh({"row": 2, "col": 2}, 0))
    with pytest.raises(ValueError, match="multiple of the number of key/value heads"):
        cp.attention(q, q[:, :, :3], q[:, :, :3])
    with pytest.raises(ValueError, match="do not fit together"):
        cp.attention(q, q[:3], q[:3])
    with pytest.raises(ValueError, match=r"\[tokens, batch, heads, head size\]"):
        cp.attention(q[0], q[0], q[0])
    with pytest.raises(ValueError, match="share dtype and device"):
        cp.attention(q, q.double(), q.double())
    zigzag = ContextParallel("ring", mesh=TraceMesh({"cp": 4}, 0), layout="zigzag")
    with pytest.raises(ValueError, match="multiple of 8"):
        zigzag.shard(torch.zeros(12))


def test_the_public_names_are_frozen() -> None:
    names = "Attend ContextParallel Gradients KeyValues Options Partial Problem Provider Queries Tree"
    assert sorted(cp_plugin.__all__) == names.split()


def test_usp_without_a_problem_chooses_at_its_first_call() -> None:
    """Shards may be cut before; a later call with other heads keeps to the choice."""

    def rank() -> tuple[list[float], list[int | None], str]:
        cp = ContextParallel("usp", group=dist.group.WORLD)
        errors, chosen = [], [cp.options.head_parallel]
        for heads in (4, 8):
            case = Case(seq_length=32, heads=heads, kv_heads=2, causal=True)
            q, k, v, _ = (cp.shard(x) for x in case.inputs())
            errors.append(relative_error(cp.unshard(cp.attention(q, k, v)), case.reference().out))
            chosen.append(cp.options.head_parallel)
        odd = torch.zeros(8, 1, 3, 8)
        with pytest.raises(ValueError, match="3 query heads") as refused:
            cp.attention(odd, odd, odd)
        return errors, chosen, str(refused.value)

    for errors, chosen, refused in run_ranks(rank, 4, init_process_group=True):
        assert max(errors) < 1e-12
        assert chosen == [None, 2, 2]
        assert "cannot be divided over 2 ranks" in refused


def test_usp_without_a_problem_refuses_what_the_first_call_cannot_do() -> None:
    def rank() -> str:
        with pytest.raises(ValueError, match="problem=Problem"):
            ContextParallel("usp", group=dist.group.WORLD, layout="striped")
        cp, x = ContextParallel("usp", group=dist.group.WORLD), torch.zeros(8, 1, 3, 8)
        with pytest.raises(ValueError, match="usp finds no way to divide 3 query") as refused:
            cp.attention(x, x, x)
        return str(refused.value)

    assert all("use ring" in refused for refused in run_ranks(rank, 2, init_process_group=True))
