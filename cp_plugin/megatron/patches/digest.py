"""Generates ``fingerprints.py``: hashes of the source of every replaced symbol, in every supported version.

    python -m cp_plugin.megatron.patches.digest DIRECTORY...

Each DIRECTORY holds a ``megatron`` package (an unpacked wheel, or a Megatron-LM checkout), which is read, not imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cp_plugin.megatron.compat import MOVED
from cp_plugin.megatron.patches.source import of_file

_HEAD = '''"""Source fingerprints of the Megatron-Core symbols that the plugin replaces. Generated, do not edit:

    python -m cp_plugin.megatron.patches.digest DIRECTORY...

with one directory per supported version that holds its ``megatron`` package.
"""

from __future__ import annotations

# symbol -> fingerprint -> the megatron-core versions whose source has it
FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {'''
OF_BRIDGE = "megatron.core.extensions.transformer_engine:TEDotProductAttention"
"""Replaced by ``cp_plugin.nemo.cpu``."""


def targets() -> dict[str, Callable[[str], bool] | None]:
    """Every symbol of Megatron-Core that the plugin replaces in any mode -> whether a version has it; None: all do."""
    from cp_plugin.megatron import planned_groups
    from cp_plugin.megatron.cpu import mode, wheel
    from cp_plugin.megatron.patches.hooks import HYBRID_MODEL, START_UP
    from cp_plugin.megatron.patches.table import DELTA_NET, HYBRID, LINEAR, PADDING, PROVIDER, RECOMPUTE, SCALING
    from cp_plugin.megatron.planned import command as planned

    of_run = (*START_UP, *PROVIDER, *RECOMPUTE, *PADDING, *SCALING, *LINEAR, *HYBRID, *DELTA_NET, HYBRID_MODEL)
    elsewhere = (*mode.PATCHES, wheel.COMPILE, planned.TE_VERSION, planned_groups.CREATE_GROUP)
    return {patch.target: patch.versions for patch in (*of_run, *elsewhere)} | {OF_BRIDGE: None}


def version_of(root: Path) -> str:
    """The megatron-core version of a source tree, from its ``package_info.py``."""
    parts: dict[str, Any] = {}
    for node in ast.parse((root / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                parts[name] = value
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts['PRE_RELEASE']}"


def table(roots: Iterable[Path], targets: Mapping[str, Callable[[str], bool] | None]) -> str:
    """The text of ``fingerprints.py`` for these source trees."""
    known: dict[str, dict[str, list[str]]] = {target: {} for target in targets}
    for root in sorted(roots, key=version_of):
        version = version_of(root)
        for target, has in targets.items():
            if has is not None and not has(version):
                continue
            versions = known[target].setdefault(_of_tree(root, target), [])
            if version not in versions:
                versions.append(version)
    lines = [_HEAD]
    for target, digests in known.items():
        if not digests:
            lines.append(f'    "{target}": {{}},')
            continue
        lines.append(f'    "{target}": {{')
        for digest, versions in digests.items():
            quoted = ", ".join(f'"{v}"' for v in versions)
            lines.append(f'        "{digest}": ({quoted}{"," if len(versions) == 1 else ""}),')
        lines.append("    },")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _of_tree(root: Path, target: str) -> str:
    """The fingerprint of a symbol, in whichever module a source tree has it."""
    module, _, name = target.partition(":")
    *places, last = (f"{place}:{name}" for place in (module, *MOVED.get(module, ())))
    for place in places:
        with suppress(ValueError):
            return of_file(root, place)
    return of_file(root, last)


def main(argv: Sequence[str]) -> int:
    if not argv:
        print("usage: python -m cp_plugin.megatron.patches.digest DIRECTORY...", file=sys.stderr)
        return 2
    replaced = targets()
    path = Path(__file__).with_name("fingerprints.py")
    path.write_text(table([Path(root) for root in argv], replaced), encoding="utf-8")
    print(f"{path.name}: {len(replaced)} symbols of {len(argv)} source trees")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
