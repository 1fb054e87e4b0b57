"""Python users get Python's words: messages of the public calls, ``repr``, groups, and padding."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from package_sources import SOURCES
from torch.distributed.device_mesh import init_device_mesh

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.launch import run_ranks

ROOMS = ("engine/", "huggingface/")
FLAGS = re.compile(r"--(cp|context|bf16|fp16|seq|micro|num|tensor|ranks)\b[\w-]*")


def said(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_the_public_class_speaks_python() -> None:
    """Its constructor, its calls, and rules that are looked at there; made from flags, it speaks of flags."""
    x = torch.zeros(8, 1, 3, 8)
    assert "provider='rign': did you mean ring? Choose one of" in said(lambda: ContextParallel("rign"))
    assert "backend='x': choose one of" in said(lambda: ContextParallel("ring", backend="x"))
    assert "use torch.bfloat16" in said(lambda: ContextParallel("ring", fp8="comm").attention(x, x, x))
    assert "backend='cudnn' cannot run here" in said(
        lambda: ContextParallel("ring", backend="cudnn").attention(x, x, x)
    )
    problem = Problem(size=2, heads=4, kv_heads=4)
    for python in (True, False):
        resolved = providers.settle("ulysses", problem, Options())

        def rank(mesh: Any, provider: Any = "ulysses" if python else resolved) -> str:
            return said(lambda: ContextParallel(provider, mesh=mesh).attention(x, x, x))

        text = run_threads(rank, resolved.axes)[0]
        assert ("a group of 2 ranks: 3 query and" in text) == python == ("--context-parallel-size 2" not in text), text


def test_flags_are_written_in_one_place() -> None:
    """No message of what Python users call has a flag in it."""
    wrong = [
        f"{file}: {text}"
        for file, source in SOURCES.items()
        if file.startswith(ROOMS) and file != "engine/core/spelling.py"
        for text in _messages(ast.parse(source))
        if FLAGS.search(text)
    ]
    assert not wrong, "write it by core.spelling.spelled"


def test_a_planted_flag_is_found() -> None:
    (message,) = _messages(ast.parse('"""--cp-grid"""\nx = f"use --cp-grid {y}"'))
    assert FLAGS.search(message)


def _messages(tree: ast.Module) -> Iterator[str]:
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_repr() -> None:
    """Provider, ranks, layout, options, and why they were chosen."""
    assert repr(ContextParallel("striped")).startswith("ContextParallel('striped', one rank, layout='striped'")
    problem = Problem(size=8, heads=8, kv_heads=4)
    resolved = providers.settle("attention2d", problem, Options())
    made = run_threads(lambda mesh: ContextParallel("attention2d", mesh=mesh, problem=problem), resolved.axes)[3]
    first, *why = repr(made).splitlines()
    assert first.startswith("ContextParallel('attention2d', rank 3 of 8, layout='zigzag', grid=(4, 2), head_groups=4")
    assert list(map(str.strip, why)) == list(made.why) and any("fewest bytes" in line for line in why)


def test_padding() -> None:
    """Up to what the layout divides, behind the last token of any dimension; nothing where nothing is missing."""
    resolved = providers.settle("ring", Problem(size=4), Options(layout="zigzag"))
    cp = run_threads(lambda mesh: ContextParallel("ring", mesh=mesh, layout="zigzag"), resolved.axes)[1]
    assert cp.divisor == 8
    x = torch.arange(2 * 13 * 3).reshape(2, 13, 3)
    for dim in (1, -2):
        padded = cp.pad(x, dim, value=-1)
        assert padded.shape == (2, 16, 3) and (padded[:, 13:] == -1).all() and torch.equal(padded[:, :13], x)
        assert torch.equal(padded.narrow(dim, 0, 13), x) and cp.shard(padded, dim).shape == (2, 4, 3)
    assert cp.pad(padded, 1) is padded and cp.pad(torch.zeros(1)).shape == (8,)
    assert ContextParallel("ring").pad(x) is x


def test_groups() -> None:
    """A process group, a mesh of one dimension or none; a mistake is refused, and never one rank's attention."""

    def rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        cp = ContextParallel("ring", group=mesh["cp"])
        assert (cp.size, cp.index) == (2, dist.get_rank() % 2)
        assert dist.get_process_group_ranks(cp.group) == [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
        assert ContextParallel("ring", group=dist.group.WORLD).size == 4
        assert ContextParallel("ring", group=None).size == 1
        x = cp.shard(torch.arange(8.0))
        assert cp.unshard(x).tolist() == list(range(8))
        assert "2 dimensions ('dp', 'cp'): give the one for" in said(lambda: ContextParallel("ring", group=mesh))
        missing = said(lambda: ContextParallel("ring"))
        assert "group is missing, and torch.distributed has 4 ranks" in missing and "group=None" in missing
        assert "group is a int" in said(lambda: ContextParallel("ring", group=4))  # type: ignore[arg-type]
        other = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            assert "does not contain this rank" in said(lambda: ContextParallel("ring", group=other))

    run_ranks(rank, 4, init_process_group=True)
    assert ContextParallel("ring").size == 1
