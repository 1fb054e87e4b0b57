"""Calls of libraries against their recorded parameters, and the record against what is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import fake_te
import library_tiles
import pytest
import torch
from fake_flash import Machine, parameters
from library_signatures import SOURCES, parameters_of, recorded, versions
from library_tiles import OnCuda
from oracle import Case, assert_close
from torch import Tensor
from torch._C import FunctionSchema, parse_schema

from cp_plugin.core.block import Scores
from cp_plugin.kernels.backends import Backend, cudnn, flash, sdpa, signatures
from cp_plugin.kernels.backends.cudnn import Cudnn
from cp_plugin.kernels.backends.flash import Flash
from cp_plugin.kernels.backends.sdpa import Sdpa

CUDA = torch.device("cuda")
TOO_OLD = {("flash-attn 2", "2.6.3"): "'window_size_left'", ("flash-attn 3", "2.7.0"): "'cu_seqlens_q'"}
"""Refused versions, and the parameter named in the refusal."""
TOO_OLD |= {("flash-attn 4", "4.0.0b3"): "'min_seqlen_k'"}
"""Versions that are refused, and the name by which."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(monkeypatch)
    flash._chosen.cache_clear()


def install(machine: Machine, library: str, version: str) -> None:
    """Fake that version on its GPU."""
    generation = int(library[-1])
    {2: machine.flash2, 3: machine.flash3, 4: machine.flash4}[generation](parameters(library, version))
    machine.gpu({2: (8, 0), 3: (9, 0), 4: (10, 0)}[generation])


FLASH = [(library, v) for library in ("flash-attn 2", "flash-attn 3", "flash-attn 4") for v in versions(library)]


@pytest.mark.parametrize(("library", "version"), FLASH, ids=map(" ".join, FLASH))
def test_recorded_versions_of_flash_attn(machine: Machine, library: str, version: str) -> None:
    install(machine, library, version)
    kernel = Flash(generation=int(library[-1]))
    reason = kernel.unsupported(CUDA, torch.bfloat16, 64, 64)
    if (library, version) in TOO_OLD:
        assert reason is not None and TOO_OLD[library, version] in reason
        return
    assert reason is None
    case = Case(seq_length=8, heads=2, kv_heads=1, causal=True, dtype=torch.bfloat16)
    assert_close(library_tiles.run(kernel, case), case.reference(), 1e-2, (library, version))


INSTALLED = {
    "flash-attn 2": ("flash-attn", "flash_attn.flash_attn_interface"),
    "flash-attn 3": ("flash_attn_3", "flash_attn_interface"),
    "flash-attn 4": ("flash-attn-4", "flash_attn.cute.interface"),
    "te": ("transformer-engine", None),
    "fla": ("fla-core", None),
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: f"{s.library} {s.version} {s.path.rsplit('/', 1)[-1]}")
def test_installed_libraries_match_the_record(source: Any) -> None:
    if source.library == "torch":
        if torch.__version__.split("+")[0] != source.version:
            pytest.skip(f"torch {torch.__version__} is installed here, not {source.version}")
        for name in source.functions:
            schema = parse_schema(f"aten::{name}{recorded('torch', source.version, name)}")
            assert _plain(schema) == _plain(getattr(torch.ops.aten, name).default._schema)
        return
    package, module = INSTALLED[source.library]
    try:
        here = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    if here != source.version:
        pytest.skip(f"{package} {here} is installed here, not {source.version}")
    module = module or source.path.removesuffix(".py").replace("/", ".")
    for name in source.functions:
        real = parameters_of(getattr(import_module(module), name))
        assert [p.split("=")[0] for p in real.split(", ")] == [
            p.split("=")[0] for p in recorded(source.library, source.version, name).split(", ")
        ]


def _plain(schema: FunctionSchema) -> tuple[object, ...]:
    arguments = [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in schema.arguments]
    return arguments, [str(r.type) for r in schema.returns]


def test_fake_transformer_engine_matches_the_record() -> None:
    fields = recorded("te", "2.20.2", "FusedAttentionParams")
    assert set(re.findall(r"(\w+)=", fake_te.PARAMETERS)) <= set(re.findall(r"(\w+)=", fields))


CALLED: dict[str, tuple[Backend, Any]] = {"sdpa": (Sdpa(), sdpa), "cudnn": (Cudnn(), cudnn), "cpu": (Sdpa(), sdpa)}
_FITS = {
    "Tensor": lambda x: x is None or isinstance(x, Tensor),  # None is an undefined tensor
    "Optional[Tensor]": lambda x: x is None or isinstance(x, Tensor),
    "bool": lambda x: isinstance(x, bool),
    "float": lambda x: isinstance(x, float),
    "Optional[float]": lambda x: x is None or isinstance(x, float),
    "int": lambda x: isinstance(x, int) and not isinstance(x, bool),
}


@pytest.mark.parametrize("version", versions("torch"))
@pytest.mark.parametrize("name", CALLED)
def test_torch_operator_calls_match_their_schemas(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """Each argument of each call against that version's schema: name, presence, type."""
    (backend, module), called = CALLED[name], []
    q, k, v, dout = Case(seq_length=8, heads=2, kv_heads=1, causal=True, dtype=torch.bfloat16).inputs()
    lse = torch.zeros(q.shape[:3])

    def operator(op: str) -> Any:
        schema = parse_schema(f"aten::{op}{recorded('torch', version, op)}")

        def call(*args: Any, **named: Any) -> tuple[Any, ...]:
            called.append(op)
            places = [a for a in schema.arguments if not a.kwarg_only]
            assert len(args) <= len(places), f"{op}: {len(args)} arguments by place, not {len(places)}"
            given = dict(zip((a.name for a in places), args, strict=False)) | named
            types = {a.name: str(a.type) for a in schema.arguments}
            assert set(given) <= set(types)
            for argument in schema.arguments:
                assert argument.name in given or argument.has_default_value(), f"{op} lacks {argument.name}"
            for argument, value in given.items():
                assert _FITS[types[argument]](value), f"{op}: {argument} is {value!r}, not {types[argument]}"
            heads_first = torch.empty(given["query"].shape)
            answers = [heads_first] * 3 if "backward" in op else [heads_first, lse.permute(1, 2, 0)]
            assert [a.name for a in schema.arguments][:4] in (
                ["query", "key", "value", places[3].name],
                ["grad_out", "query", "key", "value"],
            )
            return (*answers, *[None] * (len(schema.returns) - len(answers)))

        return call

    operators = {op: operator(op) for s in SOURCES if s.library == "torch" for op in s.functions}
    monkeypatch.setattr(module, "_aten", SimpleNamespace(**operators))
    if name != "cpu":
        q, k, v, dout = (x.as_subclass(OnCuda) for x in (q, k, v, dout))
    for diagonal in (0, 7):
        backend.forward(q, k, v, diagonal, Scores(0.5))
        backend.backward(dout, q, k, v, lse, dout, diagonal, Scores(0.5))
    assert len(called) == 4 and all(("cudnn" in op) == (name == "cudnn") for op in called)
    assert all(op.removesuffix("_backward").endswith("_for_cpu") == (name == "cpu") for op in called)


def test_parameters_of_a_custom_operator() -> None:
    """flash-attn 2 registers its functions with torch."""

    @torch.library.custom_op("cp_plugin_tests::signature", mutates_args=())
    def operator(q: Tensor, softmax_scale: float = 1.0) -> Tensor:
        return q.clone()

    assert list(signatures.parameters(operator)) == ["q", "softmax_scale"]
    assert signatures.bind(operator, ("q",), {"softmax_scale": 2.0})(q=torch.ones(2)).tolist() == [1.0, 1.0]


def test_flash_attention_4_is_not_taken_for_version_2(machine: Machine) -> None:
    machine.flash4()
    machine.gpu((8, 0))
    assert "flash-attn 2 is not installed" in str(Flash(generation=2).unsupported(CUDA, torch.bfloat16, 64, 64))
