"""TOML profiles, with validation errors in words: file, table, field, value and expectation."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cp_plugin.engine.common.names import did_you_mean

Named = Mapping[str, Callable[[str], BaseModel]]
"""Field -> lookup of the name it may hold instead of a table."""


def parse[T: BaseModel](path: Path, kind: type[T], named: Named | None = None) -> T:
    """Read a profile from TOML, with names in the fields of ``named`` looked up; ValueError for a bad file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"profile {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also of bytes that are no UTF-8, and numbers of too many digits
        raise ValueError(f"profile {path} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"profile {path} is not TOML: it is nested too deeply") from None
    what = f"profile {path}"
    return validated(kind, resolved(table, named or {}, what), what)


def resolved(values: Mapping[str, Any], named: Named, what: str) -> dict[str, Any]:
    """Look up names in the fields of ``named``; ValueError that begins with ``what``."""
    looked_up = dict(values)
    for field in named.keys() & looked_up.keys():
        if isinstance(looked_up[field], str):
            try:
                looked_up[field] = named[field](looked_up[field])
            except ValueError as error:
                raise ValueError(f"{what}: {field}: {error}") from None
    return looked_up


def validated[T: BaseModel](kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """Validate a profile; ValueError that begins with ``what`` and has a line for each mistake."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [_explained(kind, details) for details in error.errors()]
        raise ValueError(f"{what}: " + "\n  ".join(lines)) from None


def _explained(kind: type[BaseModel], details: ErrorDetails) -> str:
    loc = [str(part) for part in details["loc"] if isinstance(part, str) and part != "[key]"]
    if not loc:
        return details["msg"].removeprefix("Value error, ")
    *tables, field = loc
    place = f"[{'.'.join(tables)}] {field}" if tables else field
    match details["type"]:
        case "missing":
            return f"{place} is missing"
        case "extra_forbidden":
            return f"{place} is unknown{did_you_mean(field, _fields(kind, tables))}"
        case "literal_error":
            return f"{place} is unknown: expected {details['ctx']['expected']}"
        case "value_error":
            return f"{place} = {details['input']!r} {details['msg'].removeprefix('Value error, ')}"
    return f"{place} = {details['input']!r}: {details['msg'][0].lower()}{details['msg'][1:]}"


def _fields(kind: type[BaseModel], tables: list[str]) -> list[str]:
    """Field names of a table inside a profile; keys of dictionaries are skipped."""
    for table in tables:
        if table in kind.model_fields:
            kind = _model_in(kind.model_fields[table].annotation) or kind
    return list(kind.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in getattr(annotation, "__args__", ()) if (m := _model_in(a)) is not None), None)
