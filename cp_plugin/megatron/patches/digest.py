"""Fingerprints: a short hash of a symbol's source code, blind to comments, docstrings and formatting.

The plugin replaces a few symbols of Megatron-Core, and each replacement was written against the source it replaces.
``fingerprints.py`` records that source for every supported version; it is generated, and this file regenerates it:

    python -m cp_plugin.megatron.patches.digest DIRECTORY...

where each DIRECTORY holds a ``megatron`` package (an unpacked wheel, or a Megatron-LM checkout). Nothing is imported
from them: the hash is taken from the files.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

_LENGTH = 16


def of_object(symbol: Any) -> str:
    """The fingerprint of a live function, or of a class.

    Reads the source of the object itself, not of a function it wraps, so that a symbol somebody else has replaced does
    not pass for the original.

    Raises:
        OSError, TypeError: if there is no Python source to read.
    """
    source = inspect.getsource(symbol.__code__ if isinstance(symbol, FunctionType) else symbol)
    return _digest(ast.parse(textwrap.dedent(source)).body[0])


def of_file(root: Path, target: str) -> str:
    """The fingerprint of ``"package.module:qualified.name"`` in the source tree under ``root``.

    Raises:
        ValueError: if the module or the name is not there.
    """
    module, _, qualname = target.partition(":")
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    if not path.exists():
        path = root.joinpath(*module.split("."), "__init__.py")
    if not path.exists():
        raise ValueError(f"{root} has no module {module}")
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for name in qualname.split("."):
        found = [n for n in _held(node) if _defines(n, name)]
        if len(found) != 1:
            raise ValueError(f"{path} defines {name!r} {len(found)} times, needed exactly once")
        node = found[0]
    return _digest(node)


_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _held(node: ast.AST) -> Iterator[ast.AST]:
    """What a module or class holds, also under an ``if``; not what its functions and classes hold."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _DEFINITION):
            yield from _held(child)


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, _DEFINITION) and node.name == name


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:_LENGTH]


def _canonical(value: Any) -> str:
    """The tree as text. Absent fields are left out, so that it does not depend on the Python version that parsed it."""
    if isinstance(value, ast.AST):
        fields = [(name, _without_docstring(value, name, child)) for name, child in ast.iter_fields(value)]
        inside = ",".join(f"{name}={_canonical(child)}" for name, child in fields if child is not None and child != [])
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return repr(value)


def _without_docstring(node: ast.AST, name: str, child: Any) -> Any:
    has_one = name == "body" and isinstance(node, _DEFINITION)
    if has_one and ast.get_docstring(node, clean=False) is not None:
        return child[1:]
    return child


def version_of(root: Path) -> str:
    """The megatron-core version of a source tree, from its ``package_info.py``."""
    tree = ast.parse((root / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8"))
    parts: dict[str, Any] = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            parts[node.targets[0].id] = node.value.value
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts['PRE_RELEASE']}"


def table(roots: Iterable[Path], targets: Sequence[str]) -> str:
    """The text of ``fingerprints.py`` for these source trees."""
    known: dict[str, dict[str, list[str]]] = {target: {} for target in targets}
    for root in sorted(roots, key=version_of):
        version = version_of(root)
        for target in targets:
            versions = known[target].setdefault(of_file(root, target), [])
            if version not in versions:
                versions.append(version)
    lines = [
        '"""Source fingerprints of the Megatron-Core symbols that the plugin replaces. Generated, do not edit:',
        "",
        "    python -m cp_plugin.megatron.patches.digest DIRECTORY...",
        "",
        "with one directory per supported version that holds its ``megatron`` package.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "# symbol -> fingerprint -> the megatron-core versions whose source has it",
        "FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {",
    ]
    for target, digests in known.items():
        lines.append(f'    "{target}": {{')
        for digest, versions in digests.items():
            quoted = ", ".join(f'"{v}"' for v in versions)
            lines.append(f'        "{digest}": ({quoted}{"," if len(versions) == 1 else ""}),')
        lines.append("    },")
    lines.append("}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Regenerate ``fingerprints.py`` from the source trees named on the command line."""
    if not argv:
        print("usage: python -m cp_plugin.megatron.patches.digest DIRECTORY...", file=sys.stderr)
        return 2
    from cp_plugin.megatron.patches.hooks import HYBRID, LINEAR, PROVIDER, RECOMPUTE, SCALING, START_UP

    targets = [patch.target for patch in (*START_UP, *PROVIDER, *RECOMPUTE, *SCALING, *LINEAR, *HYBRID)]
    path = Path(__file__).with_name("fingerprints.py")
    path.write_text(table([Path(root) for root in argv], targets), encoding="utf-8")
    print(f"{path.name}: {len(targets)} symbols of {len(argv)} source trees")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
