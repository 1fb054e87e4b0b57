"""The documentation matches the code, every method has its page, and the worked examples work."""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import generate
import messages
import pytest
import third_party
import torch
from nightly import nightly
from oracle import Case, errors
from printed import ROOT, pages
from thread_ranks import run
from warm import python

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.linear import variants
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Provider
from cp_plugin.megatron.flags.args import add_arguments
from cp_plugin.megatron.flags.option_flags import options_from
from cp_plugin.planner import candidates
from cp_plugin.testing import verify
from cp_plugin.testing.traffic import price_one, trace
from cp_plugin.tools import doctor
from cp_plugin.tools.bench.contestants import Entry
from cp_plugin.tools.draw.calls import record
from cp_plugin.tools.flags import provider_options

DOCS = ROOT / "docs"
METHODS = DOCS / "methods"
WORDS, OF_A_PAGE, OF_THE_README = 50_000, 2_500, 700
"""The most there may be."""
_LINK = re.compile(r"\[[^]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_FILE = re.compile(r"(?<![\w/.<-])((?:ci|tests|docs|examples|patches|cp_plugin)/[\w./-]+\w)")
_FENCE = re.compile(r"```.*?```", re.DOTALL)


@pytest.mark.parametrize("name", [*providers.names(), "lasp2"])
def test_every_method_has_a_complete_page(name: str) -> None:
    page = (METHODS / f"{name}.md").read_text()
    blocks = [match[1] for match in re.finditer(r"<!-- generated: (.+?) -->", page)]
    wanted = {f"{block} {name}" for block in ("flags", "lengths", "check")}
    if name != "lasp2":
        wanted |= {f"{block} {name}" for block in ("drawing", "ratios")}
        assert f"images/methods/{name}.svg" in page
        assert f"({name}.md)" in (METHODS / "index.md").read_text()
    assert wanted <= set(blocks)
    assert any(block.startswith("sketch ") for block in blocks)
    formula = re.search(r"`(_?traffic\w*)` in \[(\S+)\]\(\S+\) is the formula of its bytes", page)
    assert formula and f"def {formula[1]}(" in (ROOT / formula[2]).read_text(), "no formula"
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    order = [
        title
        for title in ("When to use it", "Flags", "Who computes what", "What it sends", "The code")
        if title in sections
    ]
    assert [title for title in sections if title in order] == order and sections[-1] == "The code"
    assert "arXiv" in page and f"cp-plugin verify --provider {name}" in page
    assert re.search(r"^## Limits$", page, re.MULTILINE)
    assert len(page.split("##")[0].split()) > 40, "no idea"


def test_the_pages_are_what_the_code_gives_now() -> None:
    stale = generate.stale_pages()
    assert not stale, "\n".join(["run python docs/generate.py", *stale.values()])


@nightly
def test_drawings_are_up_to_date() -> None:
    stale, reason = generate.stale_drawings()
    if reason:
        print(reason)
    assert stale == [], "run python docs/generate.py"


def test_contributing_says_what_every_room_holds() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    top = [
        name.strip(" ()").removeprefix("cp_plugin.").replace(".", "/") for layer in layers for name in layer.split("|")
    ]
    inside = {name: sorted((ROOT / "cp_plugin" / name).glob("*/__init__.py")) for name in top}
    rooms = [room for name in top for room in (name, *(f"{name}/{path.parent.name}" for path in inside[name]))]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `([\w/]+)` \| (.*) \| `tests/.* \|$", text, re.MULTILINE) == [
        (room, _sentence(f"cp_plugin.{room.replace('/', '.')}")) for room in rooms
    ]


def _sentence(module: str) -> str:
    doc = inspect.getdoc(importlib.import_module(module)) or ""
    return " ".join(doc.partition("\n\n")[0].replace("``", "`").split())


def test_handwritten_figures() -> None:
    """They repeat a generated figure of the methods' ``index.md``."""
    share = f"{record('ring', 8, seq_length=8192, layout='contiguous').balance():.2f} times the mean on 8 ranks"
    assert all(share in (DOCS / name).read_text() for name in ("choose.md", "troubleshooting.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page(page: Path) -> None:
    """Its lists follow an empty line: a code host renders others, mkdocs appends them to the paragraph. Its links lead
    somewhere, and files that it names exist."""
    named = set(_FILE.findall(page.read_text())) - {"examples/post_training"}  # Megatron-LM's
    assert {name for name in named if not (ROOT / name).exists()} == set()
    text = _FENCE.sub("```", page.read_text())
    item = re.compile(r"\s*([-*]|\d+\.) ")
    for before, line in itertools.pairwise(text.splitlines()):
        starts = item.match(line) and not line.startswith(" ")
        assert not starts or not before or item.match(before) or before.startswith((" ", "<!--")), line
    for target, heading in _LINK.findall(text):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, heading


def test_pages_can_be_read() -> None:
    """They are short, and so are those of messages, which only the site has."""

    def words(text: str) -> int:
        return sum(any(letter.isalnum() for letter in word) for word in text.split())

    counts = {page.relative_to(ROOT).as_posix(): words(page.read_text()) for page in pages()}
    of_messages = {name: words(text) for name, text in messages.pages().items()}
    long = {name: n for name, n in (counts | of_messages).items() if n > OF_A_PAGE}
    assert not long, "split it, or move evidence into a record"
    assert sum(counts.values()) <= WORDS, sorted(counts.items(), key=lambda item: -item[1])[:5]
    assert counts["README.md"] <= OF_THE_README, "more than two screens"


def block(what: str) -> str:
    """The code block of adding.md that defines ``what``."""
    blocks = re.findall(r"```python\n(.*?)```", (METHODS / "adding.md").read_text(), re.DOTALL)
    return next(block for block in blocks if f"\n{what} = " in block)


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Provider]:
    """The method of adding.md, installed."""
    with third_party.installed(tmp_path, "gather_q", block("PROVIDER"), providers.ENTRY_POINTS, gather_q="PROVIDER"):
        yield providers.get("gather_q")


@pytest.mark.parametrize("size", [1, 4])
def test_the_example_method_is_correct_and_sends_what_it_says(example: Provider, size: int) -> None:
    """As ``cp-plugin verify`` and ``traffic`` find, which the page prints."""
    problems = [
        Problem(size=size, heads=4, kv_heads=n, head_dim=16, seq_length=64, batch=2, dtype=dtype, causal=causal)
        for n in (4, 1)
        for dtype, causal in ((torch.float64, True), (torch.float64, False), (torch.bfloat16, True))
    ]
    planned = [s for groups in (None, 1, 4) for s in verify.plan(["gather_q"], problems, Options(q_groups=groups))]
    assert size == 1 or {1, 2, 4} <= {setup.options.q_groups for setup in planned if setup.reason is None}
    for result in verify.verify(planned, "cpu", threads=True):
        assert result.ok, (result.setup, result.errors, result.failure)
        assert price_one(result.setup).ranks[-1] == trace(result.setup, size - 1), result.setup


def test_the_example_methods_option_is_a_flag_everywhere(example: Provider) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    parsed = parser.parse_args(["--cp-q-groups", "2"])
    assert options_from(parsed) == Options(q_groups=2) and "with gather_q. Default: auto" in parser.format_help()
    with pytest.raises(ValueError, match=r"^--cp-q-groups two: write a number of groups, such as 2, or auto$"):
        options_from(parser.parse_args(["--cp-q-groups", "two"]))
    with pytest.raises(ValueError, match=r"^--cp-q-groups 2 has no effect with --cp-provider ring: .* use gather_q$"):
        providers.settle("ring", Problem(size=2), Options(q_groups=2))
    assert dict(Entry.parse("gather_q:q_groups=2").options) == {"q_groups": 2}
    offered = candidates.candidates(Problem(size=2, heads=4, kv_heads=4))["gather_q"]
    assert {one.flags.rpartition("--cp-q-groups ")[2] for one in candidates.variants(offered[0])} >= {"1", "2", "4"}

    @provider_options()
    def command(*, options: Options) -> Options:
        return options

    assert command(**dict.fromkeys(providers.registry().options)) == Options()
    assert "q_groups" in inspect.signature(command).parameters


def test_the_example_method_can_be_drawn(example: Provider) -> None:
    got = record("gather_q", 4, seq_length=32)
    assert len(got.calls) == 4 * 2, "on each rank, in each of the two groups of heads that it chooses"
    assert got.setup.options.q_groups == 2 and got.balance() == pytest.approx(1, abs=0.1)
    assert all(len(call.queries) == 32 and len(call.keys) == 8 for call in got.calls)


def test_the_example_kernel_attends(tmp_path: Path) -> None:
    case = Case(seq_length=64, heads=4, kv_heads=2, causal=True, dtype=torch.float32)

    def rank(mesh: Mesh) -> float:
        return max(errors(run(ContextParallel("striped", mesh=mesh, backend="widened"), case), case.reference()))

    with third_party.installed(tmp_path, "widened", block("BACKEND"), backends.ENTRY_POINTS, widened="BACKEND"):
        assert max(run_threads(rank, {"cp": 2})) <= 1e-6
        assert backends.names()[-1] == "widened"
        assert {check.works for check in doctor.kernel_checks() if check.name == "widened"} == {True}


_KIND = """
import argparse, torch
from cp_plugin import ContextParallel
from cp_plugin.engine.comm import run_threads
from cp_plugin.engine.linear.variants import variants, Heads, LinearAttention
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
    out = layer(*map(cp.shard, (q, k, v)), None, cp.linear_attention)
    return (cp.unshard(out) - want).abs().max().item()

assert max(run_threads(rank, {"cp": 2})) < 1e-9
"""


def test_the_example_kind_of_linear_attention(tmp_path: Path) -> None:
    """In a fork, which looks for kinds anew."""
    third_party.install(tmp_path, "relu_squared", block("KIND"), variants.ENTRY_POINTS, relu_squared="KIND")
    done = python(_KIND, tmp_path)
    assert done.returncode == 0, done.stderr
