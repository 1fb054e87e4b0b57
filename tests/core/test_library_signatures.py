"""Calls of libraries against their recorded parameters, and the record against what is installed."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import fake_te
import pytest
import torch
from library_signatures import RECORD, parameters_of, recorded, versions
from library_tiles import OnCuda
from oracle import Case
from torch import Tensor
from torch._C import FunctionSchema, parse_schema

from cp_plugin.core.block import Scores
from cp_plugin.kernels.backends import Backend, cudnn, sdpa, signatures
from cp_plugin.kernels.backends.cudnn import Cudnn
from cp_plugin.kernels.backends.sdpa import Sdpa

INSTALLED = {
    "flash-attn 2": "flash-attn",
    "flash-attn 3": "flash_attn_3",
    "flash-attn 4": "flash-attn-4",
    "te": "transformer-engine",
    "fla": "fla-core",
    "torch": "torch",
}
FLASH_ATTN_3 = "hopper.flash_attn_interface"
"""Where its source is; it is installed beside packages."""


@pytest.mark.parametrize(("library", "recorded_version"), [(name, v) for name in RECORD for v in versions(name)])
def test_installed_libraries_match_the_record(library: str, recorded_version: str) -> None:
    package = INSTALLED[library]
    try:
        here = version(package).split("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    if here != recorded_version:
        pytest.skip(f"{package} {here} is installed here, not {recorded_version}")
    files = [source.split()[-1].removesuffix(".py").replace("/", ".") for source in RECORD[library][here]["sources"]]
    for name, parameters in RECORD[library][here]["functions"].items():
        if library == "torch":
            schema = parse_schema(f"aten::{name}{parameters}")
            assert _plain(schema) == _plain(getattr(torch.ops.aten, name).default._schema)
            continue
        modules = [import_module(file if file != FLASH_ATTN_3 else "flash_attn_interface") for file in files]
        (real,) = {id(f): f for f in (getattr(module, name, None) for module in modules) if f is not None}.values()
        names = [p.split("=")[0] for p in parameters_of(real).split(", ")]
        assert names == [p.split("=")[0] for p in parameters.split(", ")]


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

    operators = {op: operator(op) for op in RECORD["torch"][version]["functions"]}
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
