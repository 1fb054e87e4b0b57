"""Parameters of library functions that kernels are called by, recorded from the libraries' sources.

    python tests/library_signatures.py FOLDER       rewrites library_signatures.json

FOLDER has a git clone ``flash-attention`` (Dao-AILab/flash-attention) and the wheels named in ``SOURCES`` (``pip
download --no-deps``). Only parameter names in order, defaults and torch operator schemas are kept.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_suffix(".json")


class Source(NamedTuple):
    """A source file that defines functions of a library."""

    library: str
    version: str
    place: str
    """A tag or commit of the clone, or the prefix of a wheel's name."""
    path: str
    functions: tuple[str, ...]

    @property
    def provenance(self) -> str:
        """In words."""
        where = f"Dao-AILab/flash-attention {self.place}" if self.in_git else self.place
        return f"{where} {self.path}"

    @property
    def in_git(self) -> bool:
        """Whether it is in the clone."""
        return self.library.startswith("flash-attn") and not self.place.startswith("flash_attn_4")

    def text(self, folder: Path) -> str:
        """The source."""
        if self.in_git:
            command = ["git", "-C", str(folder / "flash-attention"), "show", f"{self.place}:{self.path}"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (wheel,) = folder.glob(f"{self.place}-*.whl")
        return zipfile.ZipFile(wheel).read(self.path).decode()


_TWO_AND_THREE = ("_flash_attn_forward", "_flash_attn_backward")
_FOUR = ("_flash_attn_fwd", "_flash_attn_bwd")
_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
)
_FA2, _FA3, _FA4 = (
    "flash_attn/flash_attn_interface.py",
    "hopper/flash_attn_interface.py",
    "flash_attn/cute/interface.py",
)
_TE = "transformer_engine/pytorch"
_FUSED, _UTILS = f"{_TE}/cpp_extensions/fused_attn.py", f"{_TE}/attention/dot_product_attention/utils.py"
FLA = {
    "simple_gla": "chunk_simple_gla",
    "gla": "chunk_gla",
    "delta_rule": "chunk_delta_rule",
    "gated_delta_rule": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
}
"""Package of fla.ops -> function."""
_YAML = "torchgen/packaged/ATen/native/native_functions.yaml"
_NEWEST = "0251105a2fb19d2957484b7f023cd8c115286ced"
SOURCES = (
    Source("flash-attn 2", "2.6.3", "v2.6.3", _FA2, _TWO_AND_THREE),
    Source("flash-attn 2", "2.7.4.post1", "v2.7.4.post1", _FA2, _TWO_AND_THREE),
    Source("flash-attn 2", "2.8.3", "v2.8.3", _FA2, _TWO_AND_THREE),
    Source("flash-attn 2", "of August 2026", _NEWEST, _FA2, _TWO_AND_THREE),
    Source("flash-attn 3", "2.7.0", "v2.7.0", _FA3, _TWO_AND_THREE),
    Source("flash-attn 3", "2.7.4.post1", "v2.7.4.post1", _FA3, _TWO_AND_THREE),
    Source("flash-attn 3", "2.8.3", "v2.8.3", _FA3, _TWO_AND_THREE),
    Source("flash-attn 3", "of August 2026", _NEWEST, _FA3, _TWO_AND_THREE),
    Source("flash-attn 4", "4.0.0b3", "flash_attn_4-4.0.0b3", _FA4, _FOUR),
    Source("flash-attn 4", "4.0.0b10", "flash_attn_4-4.0.0b10", _FA4, _FOUR),
    Source("flash-attn 4", "4.0.0b20", "flash_attn_4-4.0.0b20", _FA4, _FOUR),
    Source("flash-attn 4", "4.0.0b36", "flash_attn_4-4.0.0b36", _FA4, _FOUR),
    Source("te", "2.20.2", "transformer_engine-2.20.2", _FUSED, ("fused_attn_fwd", "fused_attn_bwd")),
    Source("te", "2.20.2", "transformer_engine-2.20.2", _UTILS, ("FusedAttentionParams",)),
    *(
        Source("fla", version, f"fla_core-{version}", f"fla/ops/{package}/chunk.py", (name,))
        for version in ("0.5.2", "0.6.0")
        for package, name in FLA.items()
    ),
    Source("torch", "2.11.0", "torch-2.11.0", _YAML, _OPERATORS),
    Source("torch", "2.13.0", "torch-2.13.0", _YAML, _OPERATORS),
)


def recorded(library: str, version: str, function: str) -> str:
    """Parameters as in the parentheses of a definition; for torch operators the schema.

    Raises:
        KeyError: if it has not been recorded.
    """
    return _record()[library][version]["functions"][function]


def versions(library: str) -> tuple[str, ...]:
    """Those that have been recorded."""
    return tuple(_record()[library])


def function(name: str, parameters: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A Python function with these parameters; ``body`` receives them by name."""
    scope: dict[str, Any] = {"body": body}
    exec(f"def {name}({parameters}):\n    return body(locals())", scope)
    return scope[name]


def parameters_of(real: Callable[..., Any]) -> str:
    """Parameters of an installed function, in the recorded form."""
    shown = []
    for parameter in inspect.signature(getattr(real, "_init_fn", real)).parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return ", ".join(shown)


def _record() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(RECORD.read_text())


def _of_python(text: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            yield node.name, ast.unparse(node.args)
        if isinstance(node, ast.ClassDef) and node.name in wanted:  # a dataclass: fields are parameters
            fields = (f for f in node.body if isinstance(f, ast.AnnAssign))
            yield (
                node.name,
                ", ".join(ast.unparse(f.target) + (f"={ast.unparse(f.value)}" if f.value else "") for f in fields),
            )


def _of_operators(text: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, schema in re.findall(r"^- func: (\w+)(\(.*)$", text, re.MULTILINE):
        if name in wanted:
            yield name, schema


def record(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Rebuild the record.

    Raises:
        ValueError: if a source lacks a function.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for source in SOURCES:
        read = _of_operators if source.path == _YAML else _of_python
        functions = dict(read(source.text(folder), source.functions))
        if missing := set(source.functions) - set(functions):
            raise ValueError(f"{source.provenance} has no {', '.join(sorted(missing))}")
        entry = found.setdefault(source.library, {}).setdefault(source.version, {"sources": [], "functions": {}})
        entry["sources"].append(source.provenance)
        entry["functions"] |= functions
    return found


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
