"""Files that users write: profiles, examples, models, datasets, communicators."""

from __future__ import annotations

import json
import math
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
import yaml
from fuzz_words import CHANGES, Found, Kind, Outcome, altered, same
from hypothesis import strategies as st

from cp_plugin.cli.examples import config as example_config
from cp_plugin.planner.machine import hardware, profile_files
from cp_plugin.planner.training import model as planner_model

SNIPPETS = st.sampled_from(
    [
        *("!!python/object/apply:os.mkdir [CANARY]", "!!python/name:os.system ", "!!bool x", "!!int x"),
        *("!!timestamp x", "!!float ", "!!binary x", "&a ", "*a", "<<: *a\n", "{", "[", "]", "}", ": ", "- ", "? "),
        *("|\n", "'", '"', "\t", "%YAML 9\n", "---\n", "...\n", "\0", "\x85", "\ufeff", "[" * 3000, "{a: " * 3000),
        *("2001-99-99", "0b", "\n", "num-layers: 2\n", "  num-layers: -1\n", "nodes: 0", ".nan", ".inf", "~", "= "),
        *("'''", '"""', "[[a]]\n", "a.b = 1\n"),
    ]
)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9), SNIPPETS | st.text(max_size=5)), max_size=3)
"""Changes of a text: position, characters removed, characters inserted."""


def profile(folder: str, changes: Any, edits: Any) -> Outcome:
    """A profile in ``devices`` or ``clusters``: refused, or read as written, within its range, and written back."""
    kind, named = (hardware.Device, {}) if folder == "devices" else (hardware.Cluster, hardware._NAMED)
    try:
        text = edited(tomli_w.dumps(altered(_toml(folder), changes)), edits)
    except (TypeError, ValueError):
        return "refused"
    path = _written("profile.toml", text)
    read = _accepted(lambda: profile_files.parse(path, kind, named), text, path.name)
    if read is None:
        return "refused"
    written, held = tomllib.loads(text), read.model_dump()
    wrong = {
        key: value
        for key, value in written.items()
        if not same(value, held.get(key)) and not (key in named and isinstance(value, str))
    }
    again = _written("again.toml", profile_files.as_toml(read))
    if wrong or set(written) - set(held) or profile_files.parse(again, kind, named) != read:
        raise Found(f"{text}\nread as {held}: {wrong}")
    _sensible(held, text)
    return "accepted"


def _sensible(held: Mapping[str, Any], text: str) -> None:
    """Found if a rate is negative or not finite."""
    for key, value in held.items():
        if isinstance(value, Mapping):
            _sensible(value, text)
        elif isinstance(value, float) and not 0 <= value < math.inf:
            raise Found(f"{text}\nwas taken with {key} = {value}")


def example(which: int, changes: Any, edits: Any) -> Outcome:
    """An example's config.yaml: refused by field, or read as written; its trainings too, or refused with a reason."""
    base = _examples()[which % len(_examples())]
    folder = _folder() / "example"
    canary = folder / "made-by-yaml"
    folder.mkdir(exist_ok=True)
    try:
        text = yaml.dump(altered(base, changes), Dumper=_DUMPER, sort_keys=False)
    except (ValueError, yaml.YAMLError):
        return "refused"
    text = edited(text, edits).replace("CANARY", str(canary))
    _written(f"example/{example_config.FILE}", text)
    read = _accepted(lambda: example_config.load(str(folder)), text, example_config.FILE)
    if canary.exists():
        canary.rmdir()
        raise Found(f"{text}\nwas executed")
    if read is None:
        return "refused"
    _held_as_written(read.config, yaml.load(text, Loader=_LOADER), text)
    for variant in read.variants:
        _usable(read, variant, text)
    return "accepted"


def _held_as_written(read: example_config.Config, written: Mapping[str, Any], text: str) -> None:
    held = read.model_dump(by_alias=True)
    for key, value in written.items():
        if key == "variants" or value is None:
            continue
        if key not in held or not same(value, held[key]):
            raise Found(f"{text}\n{key}: {value!r} was read as {held.get(key)!r}")
    sizes = [read.cluster.nodes, read.cluster.per_node, *read.lengths]
    sizes += [n for v in read.variants.values() for n in (v.lengths or ())]
    if min(sizes) < 1:
        raise Found(f"{text}\nwas taken with sizes {sizes}")
    for flag, value in read.flags.items():
        counts = flag in ("num-layers", "num-attention-heads", "hidden-size", "vocab-size")
        infinite = isinstance(value, float) and not math.isfinite(value)
        if infinite or (counts and (not isinstance(value, int) or isinstance(value, bool) or value < 1)):
            raise Found(f"{text}\nwas taken with {flag} {value}")


def _usable(read: example_config.Example, variant: str, text: str) -> None:
    """A variant has a command, or a reason against it."""
    from cp_plugin.cli.examples.command import command

    found = _accepted(lambda: command(read, variant), f"{text}\n{variant}", "")
    if found and not all(isinstance(word, str) for word in found.flags):
        raise Found(f"{text}\n{variant}: {found.flags}")


def model(which: int, changes: Any) -> Outcome:
    """A model of the planner: refused, or read as valid whole numbers with finite memory."""
    from cp_plugin.planner.training.footprint import footprint
    from cp_plugin.planner.training.parallel import Parallel

    bases = _models()
    sizes = altered(bases[which % len(bases)], changes)
    read = _accepted(lambda: planner_model.from_table("fuzz", sizes), repr(sizes), "model fuzz")
    if read is None:
        return "refused"
    if wrong := {key: value for key, value in sizes.items() if value and not same(value, getattr(read, key))}:
        raise Found(f"{sizes}\n{wrong} read as {read}")
    counts = (read.layers, read.hidden, read.heads, read.kv_heads, read.head_dim, read.ffn_hidden, read.vocab)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in counts) or read.heads % read.kv_heads:
        raise Found(f"{sizes}\nwas taken")
    try:
        total = footprint(read, Parallel()).total
    except Exception:
        raise Found(f"{sizes}\n{traceback.format_exc()}") from None
    if not 0 < total < math.inf:
        raise Found(f"{sizes}\nneeds {total} bytes")
    return "accepted"


def description(changes: Any, edits: Any) -> Outcome:
    """The .json of ``cp-plugin dataset``: ignored if it is not one, else read as written."""
    from cp_plugin.megatron.dataset.recipe import Description

    text = edited(json.dumps(altered(_DESCRIPTION, changes)), edits)
    path = _written("d.json", text).with_suffix("")
    for suffix, size in ((".bin", 9 * 2), (".idx", 34 + 12 + 16)):  # of nine tokens in one document
        path.with_suffix(suffix).write_bytes(bytes(size))
    read = _accepted(lambda: Description.of(str(path)), text, path.name)
    if read is None:
        return "refused"
    if not same(json.loads(text), json.loads(json.dumps(asdict(read)))):
        raise Found(f"{text}\nread as {read}")
    return "accepted"


def lines(line: bytes, key: str) -> Outcome:
    """A line of a .jsonl: its text, or a ValueError."""
    from cp_plugin.megatron.dataset import documents

    found = _accepted(lambda: documents._value(line, key), repr(line), "")
    if found is None:
        return "refused"
    if json.loads(line)[key] != found:
        raise Found(f"{line!r}: {key} read as {found!r}")
    return "accepted"


def communicators(table: Any, edits: Any) -> Outcome:
    """Megatron's --nccl-communicator-config-path, which our groups take their options from."""
    from cp_plugin.megatron.layers import groups

    text = edited(yaml.dump(table, Dumper=_DUMPER), edits)
    path = _written("nccl.yaml", text)
    given = {"nccl_communicator_config_path": str(path), "distributed_timeout_minutes": 1}
    given["high_priority_stream_groups"] = ["cp_plugin_ring"]
    read = _accepted(lambda: groups.options_from(given), text, path.name)
    if read is None:
        return "refused"
    if read.nccl["cp_plugin_ring"]["is_high_priority_stream"] is not True:
        raise Found(f"{text}\nread as {read.nccl}")
    return "accepted"


def edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """The text with the edits applied."""
    for where, cut, word in edits:
        at = where % (len(text) + 1)
        text = text[:at] + word + text[at + cut :]
    return text


def _accepted[T](call: Callable[[], T], text: str, name: str) -> T | None:
    """The result of a call; None for a ValueError whose message contains the name; Found for any other error."""
    try:
        return call()
    except ValueError as error:
        if name not in str(error) or not str(error):
            raise Found(f"{text}\nrefused without its name: {error!r}") from None
        return None
    except Exception:
        raise Found(f"{text}\n{traceback.format_exc()}") from None


@cache
def _holder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cp-plugin-fuzz-")


def _folder() -> Path:
    return Path(_holder().name)


def _written(name: str, text: str) -> Path:
    path = _folder() / name
    path.write_text(text, encoding="utf-8")
    return path


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@cache
def _toml(folder: str) -> dict[str, Any]:
    profiles = Path(hardware.__file__).parent / "profiles" / folder
    return tomllib.loads(sorted(profiles.glob("*.toml"))[0].read_text(encoding="utf-8"))


@cache
def _examples() -> list[dict[str, Any]]:
    """The packaged ones, shortened to two variants so that they are read quickly."""
    found = []
    for name in example_config.names():
        table = yaml.load((example_config.FOLDER / name / example_config.FILE).read_text(), Loader=_LOADER)
        variants = dict(list((table.get("variants") or {}).items())[:2])
        found.append({**table, "about": "one line", "variants": variants})
    return found


@cache
def _models() -> list[dict[str, Any]]:
    path = Path(planner_model.__file__).parent / "models.toml"
    return list(tomllib.loads(path.read_text(encoding="utf-8")).values())


_DESCRIPTION: dict[str, Any] = {
    **{"files": 1, "documents": 1, "tokens": 9, "empty": 0, "bad": 0, "vocabulary": 257, "element_bytes": 2},
    **{"flags": ["--data-path", "x"], "without_text": [], "unreadable": [], "end_of_document": 256, "recipe": {}},
}
"""As ``cp-plugin dataset`` writes it."""


def kinds() -> list[Kind]:
    some, which = st.one_of(st.just([]), EDITS), st.integers(0, 30)
    line = st.one_of(
        st.sampled_from(
            [b'{"text": "a"}', b'{"text": 1}', b"[1]", b"[" * 5000, b'{"text": "\\ud800"}', b"\xff", b"nan"]
        ),
        st.dictionaries(st.sampled_from(["text", "x"]), st.text(max_size=3) | st.none()).map(
            lambda table: json.dumps(table).encode()
        ),
        st.binary(max_size=9),
    )
    options = st.dictionaries(
        st.sampled_from(["cp_plugin_ring", "cp", "x"]),
        st.none() | st.integers() | st.dictionaries(st.text(), st.integers()),
    )
    return [
        Kind("device profiles", 10, profile, (st.just("devices"), CHANGES, some)),
        Kind("cluster profiles", 10, profile, (st.just("clusters"), CHANGES, some)),
        Kind("example configs", 4, example, (which, CHANGES, some)),
        Kind("models", 8, model, (which, CHANGES)),
        Kind("dataset files", 7, description, (CHANGES, some)),
        Kind("lines of JSON", 3, lines, (line, st.sampled_from(["text", "x"]))),
        Kind("communicators", 2, communicators, (options, some)),
    ]
