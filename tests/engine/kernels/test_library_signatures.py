"""Calls of libraries against their recorded parameters, and the record against what is installed.

Then rows without a finite score in one tile, on CUDA kernels: their results, and that merging keeps the other tile.
torch's operators are replaced by functions with their schemas that compute with the reference.
"""

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

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.kernels.backends import Backend, cudnn, sdpa, signatures
from cp_plugin.engine.kernels.backends.cudnn import Cudnn
from cp_plugin.engine.kernels.backends.reference import Reference
from cp_plugin.engine.kernels.backends.sdpa import Sdpa
from cp_plugin.engine.kernels.merge import merge

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
        installed = version(package).split("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    if installed != recorded_version:
        pytest.skip(f"{package} {installed} is installed here, not {recorded_version}")
    files = [
        source.split()[-1].removesuffix(".py").replace("/", ".") for source in RECORD[library][installed]["sources"]
    ]
    for name, parameters in RECORD[library][installed]["functions"].items():
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
            arguments = dict(zip((a.name for a in places), args, strict=False)) | named
            types = {a.name: str(a.type) for a in schema.arguments}
            assert set(arguments) <= set(types)
            for argument in schema.arguments:
                assert argument.name in arguments or argument.has_default_value(), f"{op} lacks {argument.name}"
            for argument, value in arguments.items():
                assert _FITS[types[argument]](value), f"{op}: {argument} is {value!r}, not {types[argument]}"
            heads_first = torch.empty(arguments["query"].shape)
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


def operator(name: str, blind: float) -> Any:
    """Replaces ``aten::name``; blind: its log-sum-exp of a row without a finite score."""
    schema = getattr(torch.ops.aten, name).default._schema

    def call(*args: Any, **named: Any) -> tuple[Any, ...]:
        arguments = dict(zip((a.name for a in schema.arguments if not a.kwarg_only), args, strict=False)) | named
        q, k, v = (arguments[n].permute(2, 0, 1, 3) for n in ("query", "key", "value"))
        diagonal = 0 if arguments["is_causal"] else k.size(0) - 1
        out, lse = Reference().forward(q, k, v, diagonal, Scores(arguments["scale"]))
        lse = lse.masked_fill(lse == -torch.inf, blind).permute(1, 2, 0).contiguous()
        lse = lse.unsqueeze(-1) if "cudnn" in name else lse
        return (out.permute(1, 2, 0, 3), lse, *[None] * (len(schema.returns) - 2))

    return call


KERNELS: dict[str, tuple[Backend, Any, str, float]] = {
    "sdpa": (Sdpa(), sdpa, "_scaled_dot_product_flash_attention", torch.inf),
    "cudnn": (Cudnn(), cudnn, "_scaled_dot_product_cudnn_attention", -torch.inf),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_blind_row_of_one_tile_leaves_the_other_tiles_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, causal: bool
) -> None:
    backend, module, op, blind = KERNELS[name]
    monkeypatch.setattr(module, "_aten", SimpleNamespace(**{op: operator(op, blind)}))
    q, k, v, _ = Case(seq_length=8, heads=2, kv_heads=1, causal=causal, dtype=torch.bfloat16).inputs()
    q[..., 0], unseen = q[..., 0].abs() + 1, k.clone()
    unseen[: 3 if causal else 8, ..., 0] = -torch.inf
    blind_rows = 3 if causal else 8
    diagonal = 0 if causal else 7
    on_gpu = [x.as_subclass(OnCuda) for x in (q, unseen, v)]
    part = Partial(*(x.as_subclass(Tensor) for x in backend.forward(*on_gpu, diagonal, Scores(0.5))))
    assert part.lse.isneginf().all(-1).all(-1).tolist() == [True] * blind_rows + [False] * (8 - blind_rows)
    other = Reference().forward(q, k, v, 7, Scores(0.5))
    merged = merge(Partial(*(x.float() for x in other)), Partial(part.out.float(), part.lse.float()))
    assert merged is not None and not merged.out.isnan().any()
    torch.testing.assert_close(merged.out[:blind_rows], other[0][:blind_rows].float())
    torch.testing.assert_close(merged.lse[:blind_rows], other[1][:blind_rows])


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_that_is_blind_in_some_heads_only(causal: bool) -> None:
    """torch's CPU kernel, whose log-sum-exp is repaired; a true 0 stays."""
    q, k, v, _ = Case(seq_length=8, heads=4, kv_heads=2, causal=causal, dtype=torch.float64).inputs()
    q[..., 0] = q[..., 0].abs() + 1
    k[: 3 if causal else 8, :, 0, 0] = -torch.inf
    q[0, 0, 2:] = k[0, 0, 1] = 0  # the one score that the row sees under a causal mask
    got, want = (backend.forward(q, k, v, 0 if causal else 7, Scores(0.5)) for backend in (Sdpa(), Reference()))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert want[1].isneginf().any(0).any(0).tolist() == [True, True, False, False]


def test_only_infinity_changes_its_sign() -> None:
    lse = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, -3e38])
    want = torch.tensor([1.0, -torch.inf, -torch.inf, torch.nan, -3e38])
    torch.testing.assert_close(sdpa.minus_infinity(lse), want, rtol=0, atol=0, equal_nan=True)
