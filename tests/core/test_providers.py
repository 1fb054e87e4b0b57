"""The registry: discovery and third parties; a method is one file."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import third_party
from oracle import Case, relative_error

from cp_plugin import ContextParallel
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers
from cp_plugin.methods.registry import layout_for


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    with third_party.looked_for_anew():
        yield


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str = "PROVIDER") -> None:
    third_party.install(folder, "third_party_method", textwrap.dedent(source), providers.ENTRY_POINTS, third=target)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "third_party_method", raising=False)


GATHER = """
    from dataclasses import dataclass
    from cp_plugin import KeyValues, Provider

    @dataclass(frozen=True)
    class Gather:
        mesh: object
        inner: object

        def forward(self, queries, kv, onto=None):
            n = self.mesh.axes["cp"]
            gathered = self.mesh.all_gather("cp", kv.tensors).wait()
            for i, (k, v) in enumerate(zip(*(t.chunk(n) for t in gathered))):
                onto = self.inner.forward(queries, KeyValues(k, v, owners=lambda rank, i=i: (i,)), onto)
            return onto

        def backward(self, queries, kv, onto=None):
            raise RuntimeError("forward only")

    PROVIDER = Provider(
        name="third", summary="a worked example", layouts=("striped", "contiguous"),
        axes=lambda size, options: {"cp": size},
        build=lambda mesh, local, problem, options: Gather(mesh, local),
        traffic=lambda problem, options, index: {},
        unsupported=lambda problem, options: "more than 4 ranks" if problem.size > 4 else None,
    )
"""


@pytest.mark.usefixtures("fresh_registry")
def test_a_third_party_method_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, GATHER)
    assert providers.names()[-1] == "third" and "ring" in providers.names()
    case = Case(seq_length=32, heads=4, kv_heads=2, causal=True)

    def rank(mesh: Mesh) -> float:
        cp = ContextParallel("third", mesh=mesh)
        q, k, v, _ = (cp.shard(x) for x in case.inputs())
        return relative_error(cp.unshard(cp.attention(q, k, v)), case.reference().out)

    assert max(run_threads(rank, {"cp": 4})) < 1e-12
    with pytest.raises(RuntimeError, match="'third' cannot do this: more than 4 ranks"):
        run_threads(rank, {"cp": 8})


@pytest.mark.usefixtures("fresh_registry")
def test_a_name_cannot_be_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, GATHER.replace('name="third"', 'name="ring"'))
    with pytest.raises(ValueError, match="two context-parallel providers are called 'ring'"):
        providers.registry()


@pytest.mark.usefixtures("fresh_registry")
def test_an_entry_point_must_lead_to_a_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, GATHER, "Gather")
    with pytest.raises(ValueError, match=r"'third'.* is not a cp_plugin Provider"):
        providers.registry()


def test_layouts_default_to_the_providers_first() -> None:
    assert layout_for(providers.get("ring"), ContextParallel("ring").options).name == "zigzag"
    assert layout_for(providers.get("ring"), ContextParallel("ring", layout="contiguous").options).name == "contiguous"
    assert ContextParallel("striped").layout.name == "striped"
