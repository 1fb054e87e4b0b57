"""Print the test files affected by a change: those that import, or name, a file that differs from a commit.

python ci/changed.py [BASE]     (default: the merge base with main, or HEAD on main itself)
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = {"pyproject.toml", "ci/constraints.txt", "tests/conftest.py", "tests/nightly.py"}
BY_SUFFIX = {
    ".py": {"tests/test_architecture.py"},
    ".md": {"tests/docs/test_docs.py", "tests/tools/test_printed_commands.py", "tests/docs/test_site.py"},
    ".sh": {"tests/ci/test_pipelines.py"},
}
"""Tests that read all files with a suffix."""
MODULE = re.compile(r"cp_(?:plugin|kernels)(?:\.\w+)+")


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def differing(base: str | None) -> set[str]:
    """Files that differ from ``base``, and untracked files."""
    if base is None:
        mains = git("for-each-ref", "--format=%(refname)", "refs/heads/main", "refs/remotes/origin/main")
        base = git("merge-base", "HEAD", mains[0])[0] if mains else "HEAD"
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names of all imports, including those in functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses(files: set[str]) -> dict[str, set[str]]:
    """Python file -> files that it imports, data files beside it, and files that a test or script names."""
    modules, paths, folders = defaultdict(set), defaultdict(set), defaultdict(set)
    for file in files:
        folder, _, name = file.rpartition("/")
        folders[folder].add(file)
        paths[file].add(file)
        paths[name].add(file)
        if file.endswith(".py"):
            module = file.removeprefix("kernels/").removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
            modules[module].add(file)
            if not module.startswith("cp_"):
                modules[module.rpartition(".")[2]].add(file)  # its folder is on the importer's path
    named: dict[str, set[str]] = {}
    for file in files:
        if file.endswith(".py"):
            source = (ROOT / file).read_text()
            nodes, package = list(ast.walk(ast.parse(source))), file.startswith(("cp_plugin/", "kernels/"))
            strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            names = {name for name in imported(nodes) if name.startswith("cp_") or not package}
            names |= {name for string in strings for name in MODULE.findall(string)}
            named[file] = {used for name in names for used in modules.get(name, ())}
            named[file] |= {used for string in strings if not package for used in paths.get(string, ())}
            beside = folders[file.rpartition("/")[0]]
            named[file] |= {other for other in beside if not other.endswith(".py") or "iter_modules" in source}
    return named


def touched(changed: set[str], used: dict[str, set[str]]) -> set[str]:
    """Files that reach a changed one."""
    users: dict[str, set[str]] = defaultdict(set)
    for file, others in used.items():
        for other in others:
            users[other].add(file)
    reached, open_ = set(), set(changed)
    while open_:
        reached |= open_
        open_ = {user for file in open_ for user in users[file]} - reached
    return reached


def main() -> None:
    changed = differing(*sys.argv[1:2] or [None])
    files = {file for file in git("ls-files", "--cached", "--others", "--exclude-standard") if (ROOT / file).is_file()}
    tests = {file for file in files if file.startswith("tests/") and Path(file).name.startswith("test_")}
    wanted = tests if changed & EVERYTHING else touched(changed, uses(files)) & tests
    by_suffix = (BY_SUFFIX.get(Path(file).suffix, ()) for file in changed)
    print("\n".join(sorted(wanted.union(*by_suffix) & files)))


if __name__ == "__main__":
    main()
