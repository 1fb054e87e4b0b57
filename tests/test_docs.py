"""The documentation is what the code gives now, every method has its page, and the worked example works."""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import third_party
import torch
from nightly import ALL, slow
from oracle import Case, errors, relative_error
from thread_ranks import run
from warm import python

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.cli import doctor
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.cli.draw.calls import record
from cp_plugin.cli.flags import provider_options
from cp_plugin.comm import Mesh, TraceMesh, run_threads
from cp_plugin.kernels import backends
from cp_plugin.linear import variants
from cp_plugin.megatron.flags.args import add_arguments
from cp_plugin.megatron.flags.option_flags import options_from
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Provider
from cp_plugin.planner import candidates
from cp_plugin.testing.traffic import by_phase_and_axis

DOCS = Path(__file__).parent.parent / "docs"
METHODS = DOCS / "methods"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
MODULES = (*(path.stem for path in DOCS.glob("*.py")),)
NEEDED = ("sketch", "source", "drawing", "bars", "traffic", "ratios", "flags", "refusals", "check")
_LINK = re.compile(r"\[[^]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_FENCE = re.compile(r"```.*?```", re.DOTALL)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """``docs/generate.py`` as a module."""
    monkeypatch.syspath_prepend(str(DOCS))
    import generate

    yield generate
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", providers.names())
def test_every_provider_has_a_page_with_a_drawing(name: str) -> None:
    page = (METHODS / f"{name}.md").read_text()
    blocks = [found[1].split() for found in re.finditer(r"<!-- generated: (.+?) -->", page)]
    assert [block for block in NEEDED if block not in {b[0] for b in blocks}] == []
    assert ["drawing", name] in blocks and ["traffic", name] in blocks
    assert f"images/methods/{name}.svg" in page and f"images/methods/{name}-traffic.svg" in page
    assert "arXiv" in page and f"cp-plugin verify --provider {name}" in page
    assert f"({name}.md)" in (METHODS / "index.md").read_text()


@pytest.mark.parametrize("name", [*providers.names(), "lasp2"])
def test_every_method_has_its_idea_formula_limits_and_paper(name: str) -> None:
    page = (METHODS / f"{name}.md").read_text()
    blocks = [found[1] for found in re.finditer(r"<!-- generated: (.+?) -->", page)]
    assert any(re.fullmatch(r"source \S+ _?traffic(_lasp2)?", block) for block in blocks), "no formula"
    assert {f"flags {name}", f"refusals {name}", f"check {name}"} <= set(blocks)
    assert any(block.startswith("sketch ") for block in blocks) and "arXiv" in page
    assert re.search(r"^## Limits$", page, re.MULTILINE)
    assert len(page.split("##")[0].split()) > 40, "no idea"


def test_the_pages_are_what_the_code_gives_now(generate: object) -> None:
    """By day without the block `choose`, for which the planner searches four fifths of the time."""
    but = frozenset() if ALL else {"choose"}
    assert generate.stale_pages(but) == [], "run python docs/generate.py"  # type: ignore[attr-defined]


@slow
def test_the_drawings_are_what_the_code_gives_now(generate: object) -> None:
    stale, reason = generate.stale_drawings()  # type: ignore[attr-defined]
    if reason:
        print(reason)
    assert stale == [], "run python docs/generate.py"


def test_a_changed_block_is_noticed(generate: object) -> None:
    page = (METHODS / "ring.md").read_text()
    assert generate.filled(page.replace("2.11 GB", "2.12 GB")) == page  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="unknown block 'no such'"):
        generate.filled("<!-- generated: no such -->\n<!-- end -->")  # type: ignore[attr-defined]


def test_the_drawing_of_the_layers_is_the_import_contract_now(
    generate: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import layers

    assert generate.stale_layers() == [], "run python docs/generate.py"  # type: ignore[attr-defined]
    monkeypatch.setattr(layers, "layers", lambda: [["megatron"], ["another"]])
    assert generate.stale_layers() == ["docs/images/layers.svg"]  # type: ignore[attr-defined]


def test_figures_that_are_written_by_hand() -> None:
    """They repeat what ``index.md`` of the methods has from the code."""
    share = f"{record('ring', 8, seq_length=8192).balance():.2f} times the mean on 8 ranks"
    assert all(share in (DOCS / name).read_text() for name in ("choose.md", "troubleshooting.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_site_shows_it_as_a_code_host_does(page: Path) -> None:
    """A list that no empty line sets off is one for a code host, and the end of the paragraph for the site."""
    lines = _FENCE.sub("```", page.read_text()).splitlines()
    item = re.compile(r"\s*([-*]|\d+\.) ")
    for before, line in itertools.pairwise(lines):
        starts = item.match(line) and not line.startswith(" ")
        assert not starts or not before or item.match(before) or before.startswith((" ", "<!--")), line


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in _LINK.findall(_FENCE.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, heading


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, what: str) -> None:
    """The code block of adding.md that ends in ``what``, as a third party's distribution that pip has installed."""
    blocks = re.findall(r"```python\n(.*?)```", (METHODS / "adding.md").read_text(), re.DOTALL)
    third_party.install(folder, name, next(block for block in blocks if f"\n{what} = " in block), group, **{name: what})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """The method of adding.md, installed."""
    _install(tmp_path, monkeypatch, providers.ENTRY_POINTS, "gather_q", "PROVIDER")
    providers.registry.cache_clear()
    yield providers.get("gather_q")
    providers.registry.cache_clear()
    sys.modules.pop("gather_q", None)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_worked_example_is_a_correct_method(example: Provider, causal: bool, kv_heads: int) -> None:
    case = Case(seq_length=64, heads=4, kv_heads=kv_heads, causal=causal)
    want = case.reference()

    def rank(mesh: Mesh) -> float:
        return max(errors(run(ContextParallel("gather_q", mesh=mesh, layout=layout), case), want))

    for layout in example.layouts:
        for size in (1, 2, 4):
            assert max(run_threads(rank, example.axes(size, Options()))) <= 1e-10, (layout, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_worked_examples_formula_is_its_traffic(example: Provider, dtype: torch.dtype) -> None:
    for size in (1, 2, 4):
        cp = ContextParallel("gather_q", mesh=TraceMesh(example.axes(size, Options()), 0))
        shape = (64 // size, 2, 4, 16)
        q, k, v = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
        out = cp.attention(q, k, v)
        out.backward(torch.empty_like(out))
        problem = cp.problem(q, k, v, causal=True)
        assert by_phase_and_axis(cp.mesh) == example.traffic(problem, cp.options, 0), size


def test_the_option_of_the_worked_example_is_a_flag_everywhere(example: Provider) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    parsed = parser.parse_args(["--cp-q-groups", "2"])
    assert options_from(parsed) == Options(q_groups=2) and "with gather_q. Default: auto" in parser.format_help()
    with pytest.raises(ValueError, match=r"^--cp-q-groups two: write a number of groups, such as 2, or auto$"):
        options_from(parser.parse_args(["--cp-q-groups", "two"]))
    with pytest.raises(ValueError, match=r"^--cp-q-groups 2 does nothing with --cp-provider ring: .* use gather_q$"):
        providers.settle("ring", Problem(size=2), Options(q_groups=2))
    assert dict(Entry.parse("gather_q:q_groups=2").options) == {"q_groups": 2}
    found = candidates.candidates(Problem(size=2, heads=4, kv_heads=4))["gather_q"]
    assert {one.flags.rpartition("--cp-q-groups ")[2] for one in candidates.variants(found[0])} >= {"1", "2", "4"}

    @provider_options()
    def command(*, options: Options) -> Options:
        return options

    assert command(**dict.fromkeys(providers.registry().options)) == Options()
    assert "q_groups" in inspect.signature(command).parameters


@pytest.mark.parametrize("groups", [2, 4])
def test_the_option_of_the_worked_example_changes_no_result(example: Provider, groups: int) -> None:
    case = Case(seq_length=64, heads=4, kv_heads=4, causal=True)

    def rank(mesh: Mesh) -> float:
        cp = ContextParallel("gather_q", mesh=mesh, q_groups=groups)
        q, k, v, _ = (cp.shard(x) for x in case.inputs())
        assert cp.options.q_groups == groups
        return relative_error(cp.unshard(cp.attention(q, k, v)), case.reference().out)

    assert max(run_threads(rank, example.axes(2, Options()))) <= 1e-10


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel of adding.md, installed; its name."""
    _install(tmp_path, monkeypatch, backends.ENTRY_POINTS, "widened", "BACKEND")
    backends._backends.cache_clear()
    yield "widened"
    backends._backends.cache_clear()
    sys.modules.pop("widened", None)


def test_the_worked_kernel_attends(kernel: str) -> None:
    case = Case(seq_length=64, heads=4, kv_heads=2, causal=True, dtype=torch.float32)

    def rank(mesh: Mesh) -> float:
        return max(errors(run(ContextParallel("striped", mesh=mesh, backend=kernel), case), case.reference()))

    assert max(run_threads(rank, {"cp": 2})) <= 1e-6
    assert backends.names()[-1] == kernel
    assert {check.works for check in doctor.kernel_checks() if check.backend == kernel} == {True}


def test_a_kernels_name_cannot_be_taken_twice(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "widened.py").write_text((tmp_path / "widened.py").read_text().replace('"widened"', '"sdpa"'))
    with pytest.raises(ValueError, match="two attention kernels are called 'sdpa'; the second is widened:BACKEND"):
        backends.names()
    (tmp_path / "widened.py").write_text("BACKEND = 1\n")
    monkeypatch.delitem(sys.modules, "widened")
    with pytest.raises(ValueError, match="'widened:BACKEND' is not a cp_plugin attention kernel"):
        backends.names()


_KIND = """
import argparse, torch
from cp_plugin import ContextParallel
from cp_plugin.comm import run_threads
from cp_plugin.linear.variants import variants, Heads, LinearAttention
from cp_plugin.megatron.flags import args, linear_flags

variants.cache_clear()
parser = args.add_arguments(argparse.ArgumentParser())
linear = linear_flags.linear_from(parser.parse_args(["--cp-linear-attention", "relu_squared"]))
assert linear.kind is variants()["relu_squared"] and "squared ReLU, normalised" in parser.format_help()
layer = LinearAttention(linear.kind, Heads(heads=2, kv_heads=2, head_dim=8, v_head_dim=8))
q, k, v = torch.randn(3, 32, 1, 2, 8, dtype=torch.float64)
weights = torch.einsum("ibhd,jbhd->bhij", q.relu() ** 2, k.relu() ** 2).tril()
want = torch.einsum("bhij,jbhe->ibhe", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)

def rank(mesh):
    cp = ContextParallel("lasp2", mesh=mesh)
    x = layer.prepare(*map(cp.shard, (q, k, v)))
    out = layer.finish(cp.linear_attention(x.q, x.k, x.v, x.log_decay, scale=x.scale))
    return (cp.unshard(out) - want).abs().max().item()

assert max(run_threads(rank, {"cp": 2})) < 1e-9
"""


def test_the_worked_kind_of_linear_attention_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork, which looks for kinds anew."""
    _install(tmp_path, monkeypatch, variants.ENTRY_POINTS, "relu_squared", "KIND")
    done = python(_KIND, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_worked_example_can_be_drawn(example: Provider) -> None:
    got = record("gather_q", 4, seq_length=32)
    assert len(got.calls) == 4 and got.balance() == pytest.approx(1, abs=0.1)
    assert all(len(call.queries) == 32 and len(call.keys) == 8 for call in got.calls)
