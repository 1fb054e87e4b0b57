"""The ``cp-plugin generate`` command: stream text from a checkpoint over several ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.engine.common.text import show_bytes
from cp_plugin.testing.launch import exit_status, run_ranks
from cp_plugin.testing.ranks import is_under_torchrun
from cp_plugin.tools import flags, output, shell
from cp_plugin.tools.output import new_console, print_lines

if TYPE_CHECKING:
    from cp_plugin.engine.inference.request import Report, Request
    from cp_plugin.megatron.models.text import Tokens

type Decode = Callable[[Sequence[int]], str]

_BEFORE = 8
"""Earlier tokens that are decoded with new ones: a token's text depends on its neighbours."""
_UNFINISHED = "\ufffd"


@shell.context(allow_extra_args=True, ignore_unknown_options=True)
def generate(
    context: typer.Context,
    prompt: Annotated[list[str], typer.Option(help="text to continue; repeatable")],
    load: Annotated[Path, typer.Option(metavar="FOLDER", help="Megatron checkpoint, saved by any number of ranks")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="ranks to start on this machine; default: 1; leave out under torchrun")
    ] = None,
    ckpt_step: Annotated[int | None, typer.Option(help="iteration of the checkpoint; default: the latest")] = None,
    new_tokens: Annotated[int, typer.Option(help="tokens to generate per prompt")] = 64,
    as_bytes: Annotated[
        bool, typer.Option("--bytes", help="tokens are bytes, as cp-plugin dataset writes them by default")
    ] = False,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0: always the most likely token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample from the k most likely tokens; 0: no limit")] = 0,
    top_p: Annotated[float, typer.Option(help="sample from the most likely tokens with this total probability")] = 1.0,
    sample_seed: Annotated[int, typer.Option(help="random seed for sampling")] = 0,
    chunk: Annotated[int | None, typer.Option(help="tokens of the prompt to prefill at a time; default: all")] = None,
    fp8_cache: Annotated[
        bool, typer.Option("--fp8-cache", help="keep keys and values in FP8, one byte per element")
    ] = False,
    ignore_eod: Annotated[bool, typer.Option("--ignore-eod", help="continue after the end of a document")] = False,
    own_flags: Annotated[
        bool, typer.Option("--own-flags", help="ignore the flags saved in the checkpoint; give all of them here")
    ] = False,
    as_json: output.AsJson = None,
) -> None:
    """Continue prompts with a trained model. Any other flags are Megatron's or the plugin's.

    The model's flags come from the checkpoint. All ranks that tensor parallelism leaves are context-parallel: the
    provider prefills the prompt, and keys and values stay sharded over the ranks.
    """
    from cp_plugin.engine.inference.request import Request, Sampling

    with flags.errors_in_one_line():
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=sample_seed)
        request = Request(
            prompts=tuple(prompt),
            new_tokens=new_tokens,
            as_bytes=as_bytes,
            sampling=sampling,
            chunk=chunk,
            fp8_cache=fp8_cache,
            ignore_end=ignore_eod,
        )
        if (started := is_under_torchrun()) and ranks is not None:
            raise ValueError(f"--ranks {ranks}: torchrun has already started the ranks; leave --ranks out")
        if not load.is_dir():
            raise ValueError(f"--load {load}: no such folder; name the one given to --save")
    saved = None if own_flags else (load, ckpt_step)
    more = ["--load", str(load), *([] if ckpt_step is None else ["--ckpt-step", str(ckpt_step)])]
    rank = partial(_rank, request, saved, more, context.args, as_json=as_json)
    with flags.errors_in_one_line(translated=False), _quiet():
        _preload(context.args)
    if started:
        mistakes = [rank()]
    else:
        mistakes = []
        forked = partial(run_ranks, rank, ranks or 1, timeout=None, pass_on_sigterm=True)
        with flags.errors_in_one_line(translated=False):
            status = exit_status(ranks or 1, lambda: mistakes.extend(forked()), flag="--ranks")
        if status:
            raise typer.Exit(status)
    if mistakes[0] is not None:
        typer.echo(f"error: {mistakes[0]}", err=True)
        raise typer.Exit(2)


def _preload(flags: list[str]) -> None:
    """Import what all ranks share, before they are forked."""
    from cp_plugin.megatron import activate

    activate(flags)
    import cp_plugin.megatron.models.gpt  # noqa: F401


def _rank(
    request: Request,
    saved: tuple[Path, int | None] | None,
    more: list[str],
    rest: list[str],
    *,
    as_json: Path | None,
) -> str | None:
    """Generate on this rank; return a user error, if there is one."""
    from cp_plugin.engine.inference.request import Report
    from cp_plugin.megatron.models import text

    first = os.environ["RANK"] == "0"
    try:
        with _quiet():
            sys.argv = [sys.argv[0], *text.flags(saved, rest), *more]
            model = text.load()
            tokens = text.Tokens(request.as_bytes)
            prompts = text.encode(request, tokens)
            text.require_agreement(request, prompts)
        streamed = Streamed(prompts, tokens.decode, quiet=output.only_json(as_json) or not first)
        for step in text.write(model, prompts, request, tokens):
            if not isinstance(step, Report):
                streamed.add(step)
                continue
            streamed.end()
            if first:
                _report(step, tokens, as_json=as_json)
    except ValueError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard what this process prints; errors are still raised."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _report(report: Report, tokens: Tokens, *, as_json: Path | None) -> None:
    per_second = len(report.tokens) * report.decoded / report.decode_s if report.decode_s else 0.0
    measured = (
        f"\nprefill: {report.prompt_tokens} tokens in {report.prefill_s:.2f} s "
        f"({report.prompt_tokens / report.prefill_s:,.0f} tokens/s); decode: {per_second:,.1f} tokens/s; "
        f"cache: {show_bytes(max(report.cache_bytes))} on each of {len(report.cache_bytes)} ranks; "
        f"peak memory: {show_bytes(max(report.memory_bytes))} per rank"
    )
    output.show(
        as_json,
        lambda: {"texts": [tokens.decode(text) for text in report.tokens], **asdict(report)},
        lambda: print_lines(new_console(stderr=True), measured),
    )


class Streamed:
    """Prints a single text as it grows, several texts at the end.

    A long text is decoded once; then only its last tokens are decoded again: those not yet shown and a few before.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], decode: Decode, *, quiet: bool) -> None:
        self._decode, self._quiet = decode, quiet
        self._texts = [list(ids) for ids in prompts]
        self._alone = len(prompts) == 1 and not quiet
        if self._alone:
            self._shown = len(self._texts[0])
            self._from = max(0, self._shown - _BEFORE)
            self._write(decode(self._texts[0]))

    def add(self, new: Sequence[int]) -> None:
        """Append a token to each text; -1: none."""
        for text, token in zip(self._texts, new, strict=True):
            text += [token] if token >= 0 else []
        if self._alone:
            self._advance()

    def end(self) -> None:
        """Print the rest: there are no more tokens."""
        if self._alone:
            self._advance(last=True)
            self._write("\n")
        elif not self._quiet:
            for number, text in enumerate(self._texts, 1):
                print(f"--- {number}\n{self._decode(text)}", flush=True)

    def _advance(self, *, last: bool = False) -> None:
        """Print complete characters, which may take several tokens."""
        ids = self._texts[0]
        text = self._decode(ids[self._from :])
        if text.endswith(_UNFINISHED) and not last:
            return
        self._write(text[len(self._decode(ids[self._from : self._shown])) :])
        self._from, self._shown = max(self._from, self._shown - _BEFORE), len(ids)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
