"""What the step of the start-up check is given: batches of a few tokens in the form of the run's own, moved embeddings,
strong queries and keys, fixed experts, nothing random.

    the first batch of the run's iterator --> its entries, their shapes and dtypes --> the same entries, shorter
    known entries (tokens, labels, ...)   --> drawn anew, unmasked tokens unevenly on the ranks
    others                                --> cut

The batch that was looked at is handed to the run afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.engine.core.layout import Layout
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.rules.experts import RANDOM
from cp_plugin.megatron.selfcheck.checked_call import CALL
from cp_plugin.megatron.selfcheck.readings import scramble, signs

_BOUNDS = "cu_seqlens"
_GAIN = 1.5  # of queries and keys: a score has a standard deviation of its square
_PARTS = ((0.3, 0.45), (0.2, 0.6))
"""Where the documents of a pack end, in parts of its tokens: by turns, as bounds of an earlier pack may be kept."""
_WEAKER = 6.0  # taken from alpha
_TOKENS = 32
_TOKENS_PER_RANK = 2  # under a causal mask the gradient of the first query alone is zero
_TILES = (16, 128, 2048)  # tokens of a tile: least, most, and of all ranks' together


def tokens_for(layout: Layout, size: int, *, cuda: bool) -> int:
    """Length of the check's whole sequence.

    On CUDA a rank of up to 16 has at least 256 tokens, in multiples of 128, as libraries' kernels like them; of more
    ranks each has fewer, down to 32, since every rank computes all tokens once.
    """
    least, most, together = _TILES
    tile = max(least, min(most, together // size // least * least))
    unit = layout.divisor(size) * (tile if cuda else 1)
    least = 2 * tile * size if cuda else max(_TOKENS, _TOKENS_PER_RANK * size)
    return unit * ceil(least / unit)


def each(iterators: Any, made: Callable[[Any], Any]) -> Any:
    """Return what is made of the run's iterator, or of each in its list of them; None stays: other ranks have one."""
    if isinstance(iterators, list):
        return [each(one, made) for one in iterators]
    return None if iterators is None else made(iterators)


class InPlace:
    """Batches in the place of the run's iterator: what else it has is the run's."""

    def __init__(self, iterator: Iterator[Any], batches: Iterator[Any]) -> None:
        self._iterator, self._batches = iterator, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Looked(InPlace):
    """The run's iterator, of which the first batch has been looked at."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.first = next(iterator, None)
        rest = iter(iterator.__next__, object())  # Megatron's iterators cannot be iterated over otherwise
        super().__init__(iterator, rest if self.first is None else itertools.chain([self.first], rest))


def batches(
    first: Any, tokens: int, old: int, rows: int, vocabulary: int, seed: int, *, even: bool = False
) -> Iterator[Any]:
    """Yield batches of so many tokens, forever.

    Args:
        first: of the run; what is no mapping of tensors is replaced by Megatron's entries.
        tokens, old: lengths of the sequences here and in the run.
        rows: micro-batch size, where the run's batch does not tell.
        vocabulary: tokens are below.
        even: whether every token counts in the loss.
    """
    like = first if isinstance(first, Mapping) else {}
    if not isinstance(like.get("tokens"), Tensor):
        like = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), torch.empty(rows, old)) | dict(like)
    rows, old = like["tokens"].size(0), like["tokens"].size(-1)
    for number in itertools.count(seed):
        drawn = _drawn(rows, tokens, vocabulary, torch.Generator().manual_seed(number))
        if even:
            drawn["loss_mask"].fill_(1)
        bounds = [0, *(int(part * tokens) for part in _PARTS[number % 2]), tokens]
        if any(key.startswith(_BOUNDS) for key in like):
            starts = torch.tensor(bounds)[torch.bucketize(torch.arange(tokens), torch.tensor(bounds), right=True) - 1]
            drawn["position_ids"] = (torch.arange(tokens) - starts).expand(rows, tokens)
        yield {key: _entry(key, x, drawn.get(key), bounds, old, tokens) for key, x in like.items()}


def _drawn(rows: int, tokens: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (rows, tokens + 1), generator=generator)
    share = 0.2 + 0.7 * torch.arange(tokens) / tokens
    return {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": (torch.rand(rows, tokens, generator=generator) < share).float(),
        "position_ids": torch.arange(tokens).expand(rows, tokens),
    }


def _entry(key: str, x: Any, drawn: Tensor | None, bounds: list[int], old: int, tokens: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    if drawn is not None and drawn.numel() * old == x.numel() * tokens:
        return (
            drawn.to(x.dtype if (x.numel() and x.dtype != torch.float32) or key == "loss_mask" else torch.int64)
            .reshape([tokens if n == old else n for n in x.shape])
            .contiguous()
        )
    lengths = [tokens + n - old if n in (old, old + 1) else n for n in x.shape]
    if key.startswith(_BOUNDS) and not key.endswith("argmin"):
        padding = tokens if int(x.flatten()[-1]) >= old else int(x.flatten()[-1])
        row = torch.full((lengths[-1],), padding, dtype=x.dtype)
        row[: len(bounds)] = torch.tensor(bounds, dtype=x.dtype)[: lengths[-1]]
        return row.expand(lengths).contiguous()
    if key.startswith("max_seqlen"):
        return torch.full_like(x, max(b - a for a, b in itertools.pairwise(bounds)))
    return x[tuple(slice(n) for n in lengths)].contiguous()


@contextmanager
def noisy(chunks: Sequence[Any], noise: int, size: float) -> Iterator[None]:
    """Move the embeddings' outputs by this part of themselves in the block; 0: not.

    noise: which signs.
    """

    def move(module: Any, inputs: Any, output: Tensor) -> Tensor:
        numbers = torch.arange(output.numel(), device=output.device).view_as(output)
        return (output.float() * (1 + size * signs(numbers, noise - 1))).to(output.dtype)

    embeddings = [getattr(patching.inner_model(chunk), "embedding", None) for chunk in chunks if noise]
    with ExitStack() as back:
        for embedding in embeddings:
            if isinstance(embedding, torch.nn.Module):
                back.callback(embedding.register_forward_hook(move).remove)
        yield


class Strong:
    """A hook that multiplies queries and keys of core attention, so that scores differ as those of a trained model.

    The factors are those of the first call, equal on all context-parallel ranks, and stay: what scales queries or keys
    otherwise on one rank is not hidden. (In a closure they would be put back after each step.)
    """

    def __init__(self) -> None:
        self.factors: list[float] = []

    def __call__(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = CALL.bind(module, *args, **named)
        arguments = bound.arguments
        if not self.factors:
            squares = torch.stack([arguments[name].detach().float().square().mean() for name in ("query", "key")])
            dist.all_reduce(squares, group=parallel_state.get_context_parallel_group())
            sizes = (squares / parallel_state.get_context_parallel_world_size()).sqrt().clamp(min=1e-9)
            self.factors = (_GAIN / sizes).tolist()
        for name, factor in zip(("query", "key"), self.factors, strict=True):
            arguments[name] = arguments[name] * factor
        return bound.args[1:], bound.kwargs


@contextmanager
def fixed_experts(config: Any, positions: Tensor, tokens: int) -> Iterator[list[Tensor]]:
    """In the block, routers choose experts by a token's position: of nearly equal scores, rounding errors would choose.

    The value is a list of the sums of the scores by which they would have chosen, in turn.

    Args:
        config: the model's.
        positions: of this rank's tokens, int64 ``[s/cp]``.
        tokens: of the sequence; later ones are padding.
    """
    if config.sequence_parallel:
        parts = positions.chunk(parallel_state.get_tensor_model_parallel_world_size())
        positions = parts[parallel_state.get_tensor_model_parallel_rank()]
    topk, best = torch.topk, list[Tensor]()

    def choose(scores: Tensor, k: int, dim: int = -1, *args: Any, **named: Any) -> Any:
        top = topk(scores, k, dim, *args, **named)
        if scores.dim() != 2 or scores.size(0) % len(positions) or dim not in (1, -1):  # not of each token
            return top
        at = positions.repeat_interleave(scores.size(0) // len(positions)).to(scores.device)[:, None]
        best.append(top.values.detach().double().where(at < tokens, 0).sum())
        drawn = scramble(at * scores.size(1) + torch.arange(scores.size(1), device=at.device), 0).double()
        chosen = topk(drawn.masked_fill(scores.isneginf(), -torch.inf), k).indices
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    with patching.lent(torch, topk=choose):
        yield best


def lasting(layer: Any) -> Callable[..., Any]:
    """A hook of gated delta net's projection by which decays are weak, so that states reach over several ranks."""

    def weaken(_: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        *others, alpha = output[0].tensor_split((-layer.num_v_heads_local_tp,), -1)
        return torch.cat((*others, alpha - _WEAKER), -1), output[1]

    return weaken


@contextmanager
def quiet(owners: Sequence[Any]) -> Iterator[None]:
    """In the block nothing in these modules, and in their configurations, is random, timed, or of a fixed length."""
    with ExitStack() as back:
        for owner in (one for x in owners for one in (x, getattr(x, "config", None)) if one is not None):
            off: dict[str, Any] = {}
            for name, value in vars(owner).items():
                if "dropout" in name and isinstance(value, float) and value:
                    off[name] = 0.0
                elif (name == "timers" or name in RANDOM) and value:
                    off[name] = False if isinstance(value, bool) else None
                elif name.startswith(("ub_overlap", "ub_bulk")) and value is True:  # its buffers have the run's length
                    off[name] = False
            if isinstance(owner, torch.nn.Dropout):
                off["p"] = 0.0
            back.enter_context(patching.lent(owner, **off))
        yield
