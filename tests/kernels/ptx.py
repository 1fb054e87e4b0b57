"""PTX race check: does every in-place store wait for the reads of what it overwrites?

Several threads may read one element, such as a row's log-sum-exp that all columns need. If one of them stores the new
value, another warp may read it instead of the old one, so a barrier of the whole program must lie between on every
path. The interpreter has a single thread, and ``compute-sanitizer racecheck`` covers shared memory only. The check is
conservative: it also requires the barrier where the storing thread is the only reader, since that is up to the
compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REGISTER = re.compile(r"%[a-z]+\d+")
PARAMETER = re.compile(r"^\s*\.param\s+\S+\s+(?P<pointer>\.ptr\s+)?.*?(?P<name>\w+_param_\d+)", re.MULTILINE)
STATEMENT = re.compile(r"^\s*(?P<predicate>@!?%?\w+\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)$")
LABEL = re.compile(r"^(\$?\w+):$")
THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")
ADDRESS = re.compile(r"\[\s*([^\]]+?)\s*\]")


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction of a kernel."""

    opcode: str
    operands: str
    predicated: bool
    line: int
    """Its number in the text, from 1."""

    @property
    def registers(self) -> list[str]:
        return REGISTER.findall(self.operands)


@dataclass(frozen=True, slots=True)
class Access:
    """An access to global memory."""

    reads: bool
    writes: bool
    address: str
    """The register, or the parameter's name."""


def unordered(ptx: str, memory: Sequence[int | None], *, barriers: bool = True) -> list[str]:
    """In-place stores of a kernel that may overtake another thread's read of the same memory.

    Args:
        ptx: the text of one kernel.
        memory: for each parameter the id of the storage it points into, None for non-pointers. Equal ids may overlap.
        barriers: False: as if there were none, for all stores to what was read.

    Returns:
        A sentence for each such store.

    Raises:
        ValueError: for a kernel with other parameters, or PTX with unsupported branches.
    """
    statements, successors = _flow(ptx)
    reached = _storages(statements, _pointers(ptx, memory))
    threads = int(THREADS.search(ptx).group(1))
    accesses = [_access(statement) for statement in statements]
    pending: list[frozenset[tuple[int, int]]] = [frozenset()] * len(statements)
    """Before each statement: storages, and the lines where they were read, with no barrier since on some path."""
    work = [0]
    seen = {0}
    while work:
        i = work.pop()
        after = pending[i]
        if barriers and _is_barrier(statements[i], threads):
            after = frozenset()
        elif (access := accesses[i]) is not None and access.reads:
            after |= {(storage, statements[i].line) for storage in reached.get(access.address, ())}
        for j in successors[i]:
            joined = pending[j] | after
            if joined != pending[j] or j not in seen:
                pending[j] = joined
                seen.add(j)
                work.append(j)
    found = []
    for i, (statement, access) in enumerate(zip(statements, accesses, strict=True)):
        if access is not None and access.writes:
            overwritten = reached.get(access.address, frozenset())
            lines = sorted(line for storage, line in pending[i] if storage in overwritten)
            if lines:
                found.append(
                    f"the {statement.opcode} in line {statement.line} overwrites what lines {lines} read, "
                    "and no barrier lies between"
                )
    return found


def _pointers(ptx: str, memory: Sequence[int | None]) -> dict[str, int]:
    """Pointer parameters and their storages, without the compiler's own trailing parameters."""
    parameters = [(match["name"], bool(match["pointer"])) for match in PARAMETER.finditer(ptx)]
    wrong = [
        name for (name, pointer), storage in zip(parameters, memory, strict=False) if pointer != (storage is not None)
    ]
    if wrong or len(parameters) < len(memory):
        raise ValueError(f"the kernel has the parameters {parameters}, and was described as having {list(memory)}")
    return {name: storage for (name, _), storage in zip(parameters, memory, strict=False) if storage is not None}


def _flow(ptx: str) -> tuple[list[Statement], list[list[int]]]:
    """All instructions and their successors."""
    statements: list[Statement] = []
    scopes: list[tuple[int, ...]] = []
    labels: dict[tuple[tuple[int, ...], str], int] = {}
    for line, scope, text in _body(ptx):
        if label := LABEL.match(text):
            labels[scope, label[1]] = len(statements)
        elif (match := STATEMENT.match(text)) is not None:
            statements.append(Statement(match["opcode"], match["operands"], bool(match["predicate"]), line))
            scopes.append(scope)
    successors = []
    for i, (statement, scope) in enumerate(zip(statements, scopes, strict=True)):
        kind = statement.opcode.split(".")[0]
        if kind == "brx":
            raise ValueError(f"line {statement.line} branches by a table, which this reader does not follow")
        ends = kind in ("ret", "exit", "trap", "bra") and not statement.predicated
        follow = [] if ends or i + 1 == len(statements) else [i + 1]
        if kind == "bra":
            follow.append(_target(statement, scope, labels))
        successors.append(follow)
    return statements, successors


def _body(ptx: str) -> Iterator[tuple[int, tuple[int, ...], str]]:
    """Instructions and labels: line, scope, text. Inline assembly opens scopes with braces."""
    scope: tuple[int, ...] = ()
    for number, text in enumerate(ptx.splitlines(), 1):
        text = text.split("//")[0].strip()
        if not scope and text != "{":
            continue
        while text.startswith("{"):
            scope, text = (*scope, number), text[1:].strip()
        closed = text.endswith("}")
        for part in filter(None, map(str.strip, text.removesuffix("}").split(";"))):
            if not part.startswith("."):
                yield number, scope, part
        if closed:
            scope = scope[:-1]
            if not scope:
                return


def _target(statement: Statement, scope: tuple[int, ...], labels: dict[tuple[tuple[int, ...], str], int]) -> int:
    label = statement.operands.strip()
    while scope:
        if (scope, label) in labels:
            return labels[scope, label]
        scope = scope[:-1]
    raise ValueError(f"line {statement.line} branches to {label}, which is nowhere")


def _storages(statements: Sequence[Statement], pointers: dict[str, int]) -> dict[str, frozenset[int]]:
    """Storages that each register may point into. Values loaded from global memory are not addresses."""
    found = {name: frozenset((storage,)) for name, storage in pointers.items()}
    edges = list[tuple[list[str], list[str]]]()
    for statement in statements:
        if _access(statement) is not None or not statement.registers:
            continue
        to, *_ = statement.registers
        sources = [*statement.registers[1:], *re.findall(r"\w+_param_\d+", statement.operands)]
        edges.append(([to], sources))
    changed = True
    while changed:
        changed = False
        for to, sources in edges:
            reached = frozenset().union(*(found.get(source, frozenset()) for source in sources))
            for register in to:
                if not reached <= found.get(register, frozenset()):
                    found[register] = found.get(register, frozenset()) | reached
                    changed = True
    return found


def _access(statement: Statement) -> Access | None:
    words = statement.opcode.split(".")
    addresses = [
        (REGISTER.findall(a) or re.findall(r"\w+_param_\d+", a) or [""])[0] for a in ADDRESS.findall(statement.operands)
    ]
    if words[0] in ("ld", "st", "atom", "red") and "global" in words[1:4]:
        return Access(reads=words[0] != "st", writes=words[0] != "ld", address=addresses[0])
    if words[:2] == ["cp", "async"] and "global" in words and len(addresses) > 1:
        return Access(reads=True, writes=False, address=addresses[1])
    return None


def _is_barrier(statement: Statement, threads: int) -> bool:
    """Whether it is a barrier of all threads of the program."""
    words = statement.opcode.split(".")
    if statement.predicated or words[0] not in ("bar", "barrier") or "sync" not in words or "warp" in words:
        return False
    count = [word.strip() for word in statement.operands.split(",")[1:]]
    return not count or count == [str(threads)]
