"""Writes ``known_sources.json``: the sources of every replaced symbol that were compared.

    python -m cp_plugin.megatron.patches.digest [--only SYMBOL] DIRECTORY...

Each DIRECTORY holds a ``megatron`` package (an unpacked wheel, or a Megatron-LM checkout), which is read, not imported.
Its sources are added to those that are known already; nothing that is known is lost. Add only what was compared by a
person: a known source is not checked at start-up.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron import compat
from cp_plugin.megatron.patches import difference, fingerprints, source

Known = dict[str, dict[str, dict[str, Any]]]
"""As ``fingerprints.read``."""


def targets() -> list[str]:
    """Every symbol of Megatron-Core that the plugin replaces in any mode, or compares its own with."""
    from cp_plugin.megatron.cpu import mode, wheel
    from cp_plugin.megatron.patches.hooks import OF_RUN, START_UP
    from cp_plugin.megatron.planned import command as planned

    elsewhere = (*mode.PATCHES, wheel.COMPILE, planned.TE_VERSION)
    patches = (*START_UP, *OF_RUN, *elsewhere)
    return [*dict.fromkeys(name for patch in patches for name in (patch.target, *patch.contract.also))]


def version_of(root: Path) -> str:
    """The megatron-core version of a source tree, from its ``package_info.py``."""
    parts: dict[str, Any] = {}
    for node in ast.parse((root / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                parts[name] = value
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts['PRE_RELEASE']}"


def added(known: Known, roots: Iterable[Path], names: Sequence[str], only: str | None = None) -> Known:
    """What is known of these symbols, with the sources of these trees; of one symbol only, if it is named."""
    known = {name: {digest: dict(one) for digest, one in known.get(name, {}).items()} for name in names}
    for root in sorted(roots, key=version_of):
        for name in names if only is None else [only]:
            node = _of_tree(root, name)
            if node is None:
                continue
            one = known[name].setdefault(source.digest(node), {"versions": []})
            one["versions"] = sorted({*one["versions"], version_of(root)}, key=version_tuple)
            one["lines"] = difference.hashes(node)
    return known


def _of_tree(root: Path, target: str) -> ast.AST | None:
    """A symbol in whichever module a source tree has it; None: nowhere."""
    for place in compat.places(target):
        with suppress(ValueError):
            return source.in_file(root, place)
    return None


def main(argv: Sequence[str]) -> int:
    only, roots = (argv[1], argv[2:]) if argv[:1] == ["--only"] and len(argv) > 1 else (None, argv)
    names = targets()
    if not roots or only not in (None, *names):
        print("usage: python -m cp_plugin.megatron.patches.digest [--only SYMBOL] DIRECTORY...", file=sys.stderr)
        return 2
    before = fingerprints.read()
    known = added(before, map(Path, roots), names, only)
    fingerprints.FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    new = sum(len(known[name].keys() - before.get(name, {}).keys()) for name in names)
    print(f"{len(names)} symbols, {len(roots)} source trees: {new} new sources")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
