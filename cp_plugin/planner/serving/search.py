"""Search for serving: each provider's best options for a prompt, fastest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cp_plugin.common.text import in_bytes
from cp_plugin.planner.candidates import Candidate, as_flags, candidates, refusals
from cp_plugin.planner.errors import beating
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.price import least
from cp_plugin.planner.serving.cost import Asked, Decode, Memory, Prefill, chunk_timeline, decode, memory, prefill
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel, check

IN_VAIN = 3
"""Simulations without improvement after which the rest of a provider is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    asked: Asked
    memory: Memory
    decode: Decode | None
    """None: not requested."""
    prefills: Sequence[Prefill]
    """One per provider: those that tie, simplest first; then the others, fastest first. Empty: not requested."""
    cannot: Mapping[str, str]
    """Provider -> why it cannot run this at all."""

    @property
    def fastest(self) -> float:
        """Prefill seconds of the fastest provider."""
        return min(one.seconds for one in self.prefills)

    @property
    def tied(self) -> int:
        """Number of leading ``prefills`` that tie."""
        return sum(_ties(one, self.prefills) for one in self.prefills)


def answer(asked: Asked, *, limit: float | None = None, prefills: bool = True, decodes: bool = True) -> Answer:
    """Price prefill, decode, or both.

    Args:
        limit: bytes of device memory; None: all of it.

    Raises:
        ValueError: if weights and cache do not fit, or rates are missing.
    """
    needs = memory(asked, asked.cluster.device.memory_bytes if limit is None else limit)
    if not needs.fits:
        raise ValueError(_too_large(asked, needs))
    found = _ties_first(_prefills(asked)) if prefills else []
    letters = list(asked.softmax) if prefills else []
    return Answer(
        asked=asked,
        memory=needs,
        decode=decode(asked) if decodes else None,
        prefills=found,
        cannot=refusals(asked.call(letters[0])) if letters else {},
    )


def shape(
    model: Model,
    cluster: Cluster,
    devices: int,
    base: Parallel,
    *,
    tensor: int | None,
    context: int | None,
    limit: float,
    fp8: bool,
) -> Parallel:
    """Tensor and context parallelism of one replica.

    Args:
        base: batch, tokens, dtype.
        tensor: None: the fewest ranks within a node with which weights and cache fit.
        context: None: all remaining devices.

    Raises:
        ValueError: if the model cannot be divided so.
    """
    sizes = [tensor] if tensor else [2**i for i in range(8) if 2**i <= min(devices, cluster.per_node)]
    tried: list[Parallel] = []
    reason: ValueError | None = None
    for size in sizes:
        ranks = context or devices // size
        if size * ranks != devices:
            reason = ValueError(
                f"--devices {devices} is not --tensor {size} x --context {ranks} = {size * ranks}: a single copy of "
                "the model is priced; leave --devices or --context out"
            )
            continue
        one = replace(base, devices=devices, tensor=size, context=ranks, expert_tensor=size)
        try:
            check(model, one)
        except ValueError as error:
            reason = error
            continue
        tried.append(one)
        if memory(Asked(model=model, cluster=cluster, parallel=one, fp8=fp8), limit).fits:
            return one
    if not tried:
        assert reason is not None
        raise reason
    return tried[-1]


def _prefills(asked: Asked) -> list[Prefill]:
    letters = list(asked.softmax)
    if not letters:
        return [prefill(asked, None)]
    found = [some for some in candidates(asked.call(letters[0])).values() if some and not some[0].upstream]
    return [prefill(asked, _best(asked, some, letters[0]).setup) for some in found]


def _ties_first(found: Sequence[Prefill]) -> list[Prefill]:
    found = sorted(found, key=lambda p: p.seconds)
    tying = [p for p in found if _ties(p, found)]
    return [*sorted(tying, key=_simplicity), *(p for p in found if p not in tying)]


def _ties(one: Prefill, found: Sequence[Prefill]) -> bool:
    names = {id(p): p.setup.provider.name if p.setup else "" for p in (one, *found)}
    return beating(one, found, lambda p: p.seconds, lambda p: names[id(p)]) is None


def _simplicity(one: Prefill) -> tuple[int, int]:
    """Fewer flags, then fewer bytes."""
    return len(as_flags(one.setup).split()) if one.setup else 0, one.sent


def _best(asked: Asked, some: Sequence[Candidate], letter: str) -> Candidate:
    """The fastest for the last chunk, which attends to most; tried in order of lower bounds."""
    stride = asked.parallel.tensor
    bounds = sorted(((least(c, asked.cluster, stride).forward, n) for n, c in enumerate(some)))
    best, seconds, in_vain = some[bounds[0][1]], float("inf"), 0
    for bound, number in bounds if len(some) > 1 else ():
        if bound >= seconds or in_vain == IN_VAIN:
            break
        takes = chunk_timeline(asked, some[number].setup, letter, asked.chunks - 1).forward_s
        best, seconds, in_vain = (some[number], takes, 0) if takes < seconds else (best, seconds, in_vain + 1)
    return best


def _too_large(asked: Asked, needs: Memory) -> str:
    p, longest = asked.parallel, needs.longest(asked.parallel.context)
    fits = f"the longest context that fits is {longest} tokens" if longest else "no context length fits"
    return (
        f"--seq-length {p.seq_length}: {asked.model.name} needs {in_bytes(needs.fixed + needs.cache)} on each of "
        f"{p.devices} devices (parameters {in_bytes(needs.parameters)}, cache {in_bytes(needs.cache)}), tensor "
        f"{p.tensor} x context {p.context}; {asked.cluster.device.name} has {in_bytes(needs.limit)}: {fits}. Use more "
        "--devices, --fp8, or a shorter --seq-length"
    )
