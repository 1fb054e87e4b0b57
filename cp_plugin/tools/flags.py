"""Flags and checks shared by the commands, lengths of documents among them, and the printing of their errors."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import wraps
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer

from cp_plugin.engine.common.names import did_you_mean
from cp_plugin.engine.common.versions import NO_MEGATRON
from cp_plugin.engine.core.options import Option, Options
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.launch import RankError
from cp_plugin.tools import output
from cp_plugin.tools.bench.cases import LENGTHS

if TYPE_CHECKING:
    from cp_plugin.planner.query import Query


Dtype = StrEnum("Dtype", ["float64", "float32", "bfloat16", "float16"])
"""Element types of q, k and v."""
Device = StrEnum("Device", ["auto", "cpu", "cuda"])
"""Where to run; ``auto``: CUDA if there is a device, else the CPU."""
Decays = StrEnum("Decays", ["none", "head", "token", "key"])
"""Granularity of the decay of linear attention."""
Mask = StrEnum("Mask", ["causal", "full"])
"""Which tokens a token sees: those up to itself, or all."""
Providers = Annotated[
    list[str] | None,
    typer.Option("--provider", metavar="NAME", help="context-parallel method; repeatable; default: all"),
]
Devices = Annotated[Device, typer.Option(help="device to run on; auto: CUDA where there is one")]
Heads = Annotated[int, typer.Option(min=1, help="query heads of the model per tensor-parallel rank")]
ValueDim = Annotated[int | None, typer.Option(min=1, help="size of a value head; default: --head-dim")]
ForkedRanks = Annotated[
    int | None, typer.Option(min=1, help="ranks to start on this machine; default: 4; leave out under torchrun")
]
Timeout = Annotated[
    float, typer.Option(min=1, max=10**7, help="time limit in seconds for ranks started on this machine")
]


_OURS = {
    r"^unknown (model|cluster) '(.*?)'": r"--\1 \2",
    r"^unknown variant of \S+ '(.*?)'": r"--variant \1",
    r"^unknown paper '(.*?)'": r"--reproduce \1",
    r"^profile (.*) (cannot be read|is not TOML)": r"--cluster \1 \2",
    r"^heads (\d+), kv_heads (\d+):": r"--heads \1 --kv-heads \2:",
    r"^sequence length (\d+)": r"--seq-length \1",
    r"^provider '(\w+)'": r"--provider \1",
    r"--bf16\b": "--dtype bfloat16",
    r"--fp16\b": "--dtype float16",
}
"""What messages call by another name than a command's flag."""


def replace_megatron_flags(text: str, ranks: str = "--ranks") -> str:
    """Replace Megatron's flags in a message by those of a command; ``ranks``: its flag for the number of ranks."""
    for pattern, flag in _OURS.items():
        text = re.sub(pattern, flag, text)
    return text.replace("--context-parallel-size", ranks).replace("--cp-", "--")


@contextmanager
def errors_in_one_line(ranks: str = "--ranks", *, translated: bool = True) -> Iterator[None]:
    """User errors: one line on stderr and exit status 2. A failed rank: its report and exit status 1.

    Args:
        ranks: the command's flag for the number of ranks.
        translated: whether the command has flags of its own where a message names Megatron's.
    """
    try:
        yield
    except ValueError as error:
        output.error(replace_megatron_flags(str(error), ranks) if translated else str(error))
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "megatron":
            raise
        output.error(NO_MEGATRON)
        raise typer.Exit(2) from None
    except RankError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def provider_options[Command: Callable[..., Any]](without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Replace a command's argument ``options`` by a flag for each option that a provider declares.

    without: options that have no meaning for the command.
    """
    every = providers.registry().options.values()
    declared = [option for option in every if option not in without]

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)

        @wraps(command)
        def called(**arguments: Any) -> Any:
            with errors_in_one_line():
                texts = {option: arguments.pop(option) for option in declared}
                values = {option: option.parse(text) for option, text in texts.items() if text is not None}
                options = Options(**{option: value for option, value in values.items() if value is not None})
            return command(**arguments, options=options)

        parameters = list(signature.parameters.values())
        at = list(signature.parameters).index("options")
        parameters[at : at + 1] = map(_parameter, declared)
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {}
        return cast(Command, called)

    return decorated


def _parameter(option: Option) -> inspect.Parameter:
    metavar = f"[{'|'.join((option.unset, *option.choices))}]" if option.choices else option.metavar
    shown = typer.Option(
        f"--{option.replace('_', '-')}", metavar=metavar, help=f"{option.meaning}; default: {option.default}"
    )
    return inspect.Parameter(
        str(option), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, shown]
    )


def check_decay(decay: str, kinds: Collection[str]) -> None:
    """ValueError for ``--decay`` where no method is for linear attention."""
    if decay != Decays.none and "linear" not in kinds:
        linear = ", ".join(providers.names("linear"))
        raise ValueError(
            f"--decay {decay} is for linear attention: leave it out, or use --provider with one of {linear}"
        )


def refuse(values: Mapping[str, object], reason: str) -> None:
    """ValueError for a flag that makes no sense here; None: the flag was not given."""
    for flag, value in values.items():
        if value is not None:
            shown = value[0] if isinstance(value, list) else value
            raise ValueError(f"{flag} {shown} {reason}: leave it out")


def torch_dtype(name: Dtype) -> torch.dtype:
    return getattr(torch, name.value)


def device_name(device: Device) -> str:
    """``cpu`` or ``cuda``, without initialising CUDA, which must wait until ranks are forked."""
    devices = torch.cuda.device_count()
    if device == Device.cuda and devices == 0:
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cpu" if device == Device.cpu or devices == 0 else "cuda"


Documents = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTHS",
        help="packed documents: a file with their lengths in tokens, lengths such as 600,200,224, or a distribution: "
        "chat, code, long",
    ),
]


def packed(query: Query, text: str | None) -> Query:
    """Fill every sequence with documents, unless ``text`` is None; ValueError as for ``bounds``.

    Megatron joins the sequences of a micro-batch, and fills them so.
    """
    from cp_plugin.planner.query import join_documents

    if text is None:
        return query
    documents = document_lengths(text, query.shapes[0].seq_length * query.shapes[0].micro_batch)
    return replace(query, shapes=[join_documents(shape, documents) for shape in query.shapes])


def document_lengths(text: str, seq_length: int) -> tuple[int, ...]:
    """The length of each document in a sequence; ValueError as for ``bounds``."""
    return tuple(end - start for start, end in pairwise(bounds(text, seq_length)))


def bounds(text: str, seq_length: int) -> tuple[int, ...]:
    """Return where the documents of a sequence begin, and its length.

    Given lengths are repeated until the sequence is full; the last document is truncated. ValueError for a text that is
    neither a file, nor lengths, nor a distribution, and for invalid lengths.
    """
    if text in LENGTHS:
        return tuple(accumulate(LENGTHS[text].pack(seq_length), initial=0))
    ends, more = [0], cycle(lengths(text))
    while ends[-1] < seq_length:
        ends.append(min(seq_length, ends[-1] + next(more)))
    return tuple(ends)


def lengths(text: str) -> list[int]:
    """The lengths in a file or a list; ValueError as for ``bounds``."""
    words = text.split(",")
    if len(words) == 1 and not _is_length(text):
        try:
            words = Path(text).read_text(encoding="utf-8", errors="replace").split()
        except (OSError, ValueError):  # such as a name that is too long
            what = "a folder" if os.path.isdir(text) else "no such file"
            raise ValueError(
                f"--documents {text}: {what}{did_you_mean(text, LENGTHS) or '.'} Give a file, lengths such as "
                f"600,200,224, or one of {', '.join(LENGTHS)}"
            ) from None
    wrong = [f"{word!r} is not a length" for word in words if not _is_length(word)] or ["it is empty"] * (not words)
    if wrong:
        raise ValueError(f"--documents {text}: {wrong[0]}; write the tokens of each document, 1 or more")
    return [int(word) for word in words]


def _is_length(word: str) -> bool:
    return word.isdecimal() and word.isascii() and int(word) > 0
