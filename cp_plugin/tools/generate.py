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
from cp_plugin.testing.ranks import is_under_torchrun, number_of_ranks
from cp_plugin.tools import flags, output
from cp_plugin.tools.output import new_console, print_lines

if TYPE_CHECKING:
    from cp_plugin.engine.inference.request import Report, Request
    from cp_plugin.megatron.models.text import Tokens

type Decode = Callable[[Sequence[int]], str]

_BEFORE = 8
"""Earlier tokens that are decoded with new ones: a token's text depends on its neighbours."""
_UNFINISHED = "\ufffd"


def generate(
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
    as_json: output.AsJson = False,
    words: Annotated[list[str] | None, typer.Argument(metavar="FLAGS", help="flags of Megatron and the plugin")] = None,
) -> None:
    """Continue prompts with a trained model. Any other flags are Megatron's or the plugin's.

    The model's flags come from the checkpoint. Ranks that tensor parallelism leaves are context-parallel.
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
        count = number_of_ranks(ranks, default=1)
        if not load.is_dir():
            raise ValueError(f"--load {load}: no such folder; name the one given to --save")
    saved = None if own_flags else (load, ckpt_step)
    more = [*(words or []), "--load", str(load), *([] if ckpt_step is None else ["--ckpt-step", str(ckpt_step)])]
    rank = partial(_rank, request, saved, more, as_json=as_json)
    with flags.errors_in_one_line(translated=False):
        with _quiet():
            _preload(words or [])
        if is_under_torchrun():
            rank()
            return
        forked = partial(run_ranks, rank, count, timeout=None, pass_on_sigterm=True)
        raise typer.Exit(exit_status(count, forked, flag="--ranks"))


generate.context_settings = {"ignore_unknown_options": True}  # type: ignore[attr-defined]  # Megatron's flags


def _preload(flags: list[str]) -> None:
    """Import what all ranks share, before they are forked."""
    from cp_plugin.megatron import activate

    activate(flags)
    import cp_plugin.megatron.models.gpt  # noqa: F401


def _rank(request: Request, saved: tuple[Path, int | None] | None, words: list[str], *, as_json: bool) -> None:
    """Generate on this rank; ``saved``: where to read the model's flags, besides ``words``. ValueError for a user
    error."""
    from cp_plugin.engine.inference.request import Report
    from cp_plugin.megatron.models import text

    first = os.environ["RANK"] == "0"
    with _quiet():
        sys.argv = [sys.argv[0], *text.flags(saved, words)]
        model = text.load()
        tokens = text.Tokens(request.as_bytes)
        prompts = text.encode(request, tokens)
        text.require_agreement(request, prompts)
    streamed = Streamed(prompts, tokens.decode, quiet=as_json or not first)
    for step in text.write(model, prompts, request, tokens):
        if not isinstance(step, Report):
            streamed.add(step)
            continue
        streamed.end()
        if first:
            _report(step, tokens, as_json=as_json)


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


def _report(report: Report, tokens: Tokens, *, as_json: bool) -> None:
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

    A long text is decoded once; then only its last tokens are decoded again.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], decode: Decode, *, quiet: bool) -> None:
        self._decode, self._quiet = decode, quiet
        self._texts = [list(ids) for ids in prompts]
        self._from = self._seen = 0  # from this token on, this many characters have been printed
        self.add([-1] * len(prompts))

    def add(self, new: Sequence[int]) -> None:
        """Append a token to each text; -1: none."""
        for text, token in zip(self._texts, new, strict=True):
            text += [token] if token >= 0 else []
        if len(self._texts) == 1:
            self._print_new(self._texts[0])

    def end(self) -> None:
        """Print the rest: there are no more tokens."""
        if len(self._texts) == 1:
            self._print_new(self._texts[0], end="\n")
        elif not self._quiet:
            for number, text in enumerate(self._texts, 1):
                print(f"--- {number}\n{self._decode(text)}", flush=True)

    def _print_new(self, ids: list[int], *, end: str = "") -> None:
        """Print complete characters, which may take several tokens."""
        text = "" if self._quiet else self._decode(ids[self._from :])
        if self._quiet or (text.endswith(_UNFINISHED) and not end):
            return
        sys.stdout.write(text[self._seen :] + end)
        sys.stdout.flush()
        self._from = max(self._from, len(ids) - _BEFORE)
        self._seen = len(self._decode(ids[self._from :]))
