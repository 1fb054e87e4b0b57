"""Does anything but attention look at other tokens, or at the length of a shard? Exact in any dtype.

Attention is replaced by a function of each token's own query, key and value, and layers that can be divided by one of
each token's own input. Then

* a NaN planted in one token must stay there: sums, convolutions, scans and norms over tokens spread it, even those
  whose weight is still zero;
* one token exchanged for another must not move the others, as it does where tokens compete for experts;
* a token must not notice that it is computed in a shard: angles or scales made of the local length or the local index
  would move it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.huggingface.attention import Call, Division, placed, refuse_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 16
_MOST_TOKENS = 4096
"""Longest length in a config that is examined with as many tokens; beyond it, with positions only."""
_MOST_POSITIONS = 2**20


class Alone:
    """Attention in which a token sees itself only. Keeps queries and keys."""

    own = False

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.layers = 0

    def mask(self, **arguments: Any) -> None:
        return None

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        refuse_options(options, 0.0)
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        self.layers += 1
        self.kept |= {f"in attention {self.layers} the {name}": x for name, x in (("queries", query), ("keys", key))}
        weights = torch.linspace(0.5, 1.5, query.size(3), device=query.device, dtype=query.dtype)
        return (((query + key) * weights).sum(-1, keepdim=True) + value).transpose(1, 2).contiguous()


def require_no_mixing(model: PreTrainedModel, division: Division) -> None:
    """
    Raises:
        ValueError: naming the first layer whose output for a token depends on another.
    """
    ids = tokens(model, TOKENS)
    crowd = tokens(model, max(TOKENS, 2 * longest(model.config, "capacity")))

    def examine(exact: bool) -> None:
        with probing(model, division, Alone(), Call()), Plain(exact):
            result = output(model, input_ids=ids)
            if not isinstance(result, Tensor) or result.dim() != 3 or result.shape[:2] != ids.shape:
                shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise not_next_token(model, f"for input_ids {list(ids.shape)} its output is {shape}")
            for training in (False, True):
                model.train(training)
                _spreads_nothing(model, ids)
                _moves_nothing(model, ids)
                # one token everywhere, which crowds its experts, beside another one in each row
                _moves_nothing(model, crowd[:, -1:].expand_as(crowd))

    _exactly(model, examine)


def _spreads_nothing(model: PreTrainedModel, ids: Tensor) -> None:
    """Check that a token that is NaN, token i in row i, spreads nowhere."""
    culprits: list[str] = []
    own = torch.eye(TOKENS, dtype=torch.bool, device=ids.device)

    def plant(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if args and isinstance(args[0], Tensor) and args[0].shape == ids.shape and torch.equal(args[0], ids):
            return output.masked_fill(own.view(*own.shape, *(1,) * (output.dim() - 2)), float("nan"))
        return None

    def spread(values: Any) -> bool:
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.shape[:2] == own.shape]
        return any(bool((x.reshape(*own.shape, -1).isnan().any(-1) & ~own).any()) for x in tensors)

    def watch(where: str, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if not culprits and spread(output) and not spread((args, named)):
            culprits.append(f"{type(layer).__name__} ({where})")

    first = model.get_input_embeddings()
    with ExitStack() as hooks:
        for where, layer in model.named_modules():
            if layer is first or isinstance(layer, nn.Embedding):
                hooks.callback(layer.register_forward_hook(plant, prepend=True).remove)
            if where:
                hooks.callback(layer.register_forward_hook(partial(watch, where), with_kwargs=True).remove)
        nan = output(model, input_ids=ids).flatten(2).isnan().any(-1)
    if culprits or bool((nan & ~own).any()):
        raise _mixes(model, f"in {culprits[0] if culprits else type(model).__name__} a token depends on others")
    if not bool((nan & own).any(1).all()):
        raise _mixes(model, "an output does not depend on its own token, so the model cannot be examined")


def _moves_nothing(model: PreTrainedModel, ids: Tensor) -> None:
    """Check that another token, token i in row i, changes no other token."""
    vocabulary = model.config.vocab_size
    other = (tokens(model, ids.size(1)) + 1 + vocabulary // 2) % vocabulary
    own = torch.eye(*ids.shape, dtype=torch.bool, device=ids.device)
    results = []
    for x in (ids, torch.where(own, other, ids)):
        torch.manual_seed(0)
        results.append(output(model, input_ids=x).clone())
    before, after = results
    moved = (before - after).abs().flatten(2).amax(-1)
    # a batch of experts that has one token more or less is multiplied in other blocks, which rounds differently
    rounding = 64 * torch.finfo(before.dtype).eps * before.abs().amax()
    if bool((moved.masked_fill(own, 0) > rounding).any()):
        raise _mixes(model, "changing one token changes the results of others")


def require_local(model: PreTrainedModel, division: Division) -> None:
    """This rank's tokens must be computed alike in a shard and in the whole sequence.

    Sequences are as long, and positions go as far, as any window or length in the config. In training, numbers that
    would be drawn are the largest that might be.

    Raises:
        ValueError: telling where they are not.
    """
    limit = min(_MOST_POSITIONS, _learned_positions(model))

    def examine(exact: bool) -> None:
        for number, positions in enumerate(_spread(division.cp, model.config, limit)):
            for training in (False, True)[: 1 if number else 2]:
                _compute_alike(model, division, positions, training, exact)

    _exactly(model, examine)


def _compute_alike(model: PreTrainedModel, division: Division, positions: Tensor, training: bool, exact: bool) -> None:
    count = len(positions)
    cp, positions = placed(division.cp, (0, count)), positions.to(model.device)[None]
    ids = tokens(model, count)[:1]
    run = output if count == TOKENS * cp.size else body

    def computed(ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        division.probe = alone = Alone()
        results = run(model, input_ids=ids, position_ids=positions)
        return {**alone.kept, "the results": results}

    with probing(model, division, None, Call(count, int(positions.max())), training), Plain(exact):
        want = computed(ids, positions)
        if training and not torch.equal(want["the results"], computed(ids, positions)["the results"]):
            return  # it draws numbers of other kinds, by which it would differ
        got = computed(cp.shard(ids, 1), cp.shard(positions, 1))
    dtype = coarsest(nn.Module() if exact else model, *(x.dtype for x in want.values()))
    for what, x in want.items():
        if not (error := apart(cp.shard(x, -2), got[what], -1, dtype)) <= allowed(dtype):
            raise ValueError(
                f"{type(model).__name__} would compute something else on shards: {what} of a token depend on the "
                f"shard's length or the token's index in it: relative error {error:.1e} at positions up to "
                f"{int(positions.max())}{' in training' * training}"
            )


def _exactly(model: nn.Module, examine: Callable[[bool], None]) -> None:
    """In float32, so that no fault hides behind rounding; as it is, if the model cannot. ``examine`` is told which."""
    if coarsest(model).itemsize == 2:
        try:
            return examine(True)
        except ValueError:
            raise
        except Exception:  # a kernel that takes one dtype only, or no memory for two
            pass
    examine(False)


class Plain(TorchFunctionMode):
    """Nothing is dropped, and random numbers are the largest that might be drawn: a token's noise tells its size.

    If exact, whoever reads a tensor of 16 bits gets one of float32.
    """

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(function, "__name__", ""), kwargs or {}
        if name in _DROPS:
            return args[0] if args else named["input"]
        if self.exact:
            written = args[: bool(re.fullmatch(_WRITES, name))]
            args, named = tree_map_only(Tensor, _wide, (args, named))
            args = (*written, *args[len(written) :])
        result = function(*args, **named)
        if name in _DRAWS:
            most = _DRAWS[name]
            result.fill_((args[2] if len(args) > 2 else named.get(most, 1.0)) if most else 1.0)
        return result


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.itemsize == 2 else x


_WRITES = r"__(i|set)\w*|\w*[^_]_"
"""Names of functions that change their first argument."""
_DROPS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_DRAWS = {"uniform_": "to", "normal_": "std"}
_DRAWS |= dict.fromkeys(("rand", "randn", "rand_like", "randn_like", "bernoulli", "exponential", "exponential_"), "")
"""Name of a function -> that of its third argument, which bounds what it draws."""


@contextmanager
def probing(
    model: PreTrainedModel, division: Division, probe: Any, call: Call, training: bool = False
) -> Iterator[None]:
    """Replace attention by ``probe`` in the block, in this call and mode; the model is as before afterwards."""
    division.probe, division.call = probe, call
    try:
        with unchanged(model):
            model.train(training)
            yield
    finally:
        division.probe = division.call = None


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """No gradients in the ``with`` block; buffers, modes, what rotary embeddings keep and random numbers are as before
    afterwards."""
    modes = {layer: layer.training for layer in model.modules()}
    buffers = [
        (layer, name, x, x.clone()) for layer in model.modules() for name, x in layer._buffers.items() if x is not None
    ]
    states = [(layer, dict(vars(layer))) for layer in model.modules() if not any(True for _ in layer.parameters())]
    try:
        with torch.no_grad(), torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        for layer, state in states:
            for name in vars(layer).keys() - state.keys():
                delattr(layer, name)
            vars(layer).update(state)
        for layer, name, x, kept in buffers:
            layer._buffers[name] = x.copy_(kept)
        for layer, mode in modes.items():
            layer.training = mode


def output(model: PreTrainedModel, **batch: Tensor) -> Tensor:
    """Logits, or what a model without a head returns."""
    return model(**batch, use_cache=False)[0]


def body(model: PreTrainedModel, **batch: Tensor) -> Tensor:
    """The output before the head, which for many tokens would be large."""
    return model.base_model(**batch, use_cache=False)[0]


def tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Token ids ``[TOKENS, count]``, alike in all rows."""
    numbers = torch.arange(count, device=model.device) * 7919  # a prime: they differ
    return (numbers % model.config.vocab_size).expand(TOKENS, -1).contiguous()


WINDOWS = r"window|chunk|block|local"
_LENGTHS = rf"{WINDOWS}|position|length|floor|context|scale"


def longest(config: Any, names: str = _LENGTHS) -> int:
    """Of these that are examined with as many tokens; 0: there is none."""
    return max((n for n in _lengths(config, names) if n <= _MOST_TOKENS), default=0)


def _lengths(config: Any, names: str) -> set[int]:
    """Numbers in a config at which something may begin, of settings with such a name."""
    numbers: set[int] = set()

    def look(values: Any, named: bool) -> None:
        for key, x in values.items():
            meant = named or bool(re.search(names, str(key)))
            if isinstance(x, dict):
                look(x, named)
            elif isinstance(x, int | float) and not isinstance(x, bool) and meant and TOKENS < x <= _MOST_POSITIONS:
                numbers.add(int(x))

    look({key: x for key, x in vars(config).items() if not key.startswith("_")}, False)
    return numbers


def allowed(dtype: torch.dtype) -> float:
    """Far above rounding."""
    return 0.05 if dtype.itemsize < 4 else 1e-3


def _spread(cp: ContextParallel, config: Any, limit: int) -> Iterator[Tensor]:
    """Increasing positions: without gaps, as far as the longest length allows, and with gaps beyond each length."""
    count = TOKENS * cp.size
    yield torch.arange(count) % limit
    if count < (long := min(limit, longest(config) * 3 // 2)):
        yield torch.arange(cp.layout.padded(long, cp.size)) % limit
    for end in sorted({min(limit, 2 * end) for end in _lengths(config, _LENGTHS)}):
        positions = torch.linspace(0, end - 1, count).long()
        if len(positions.unique()) == count:
            yield positions


def _learned_positions(model: nn.Module) -> int:
    sizes = [
        layer.num_embeddings - 2  # OPT's begin at 2
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding) and re.search(r"pos|wpe", name)
    ]
    return min(sizes, default=_MOST_POSITIONS)


def coarsest(model: nn.Module, *computed: torch.dtype) -> torch.dtype:
    """Return the parameters' coarsest dtype: results are rounded to it somewhere, also where logits are float32."""
    dtypes = {p.dtype for p in model.parameters()}.union(computed)
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def apart(want: Tensor, got: Tensor, dim: int, dtype: torch.dtype) -> float:
    """How far rows along ``dim`` are apart, relative to the largest row: the farthest one; in 16 bits the farthest but
    for an eighth, since a router may send a token that is rounded otherwise to another expert."""
    want, got = want.double(), got.double()
    errors = (want - got).norm(dim=dim).flatten() / want.norm(dim=dim).max().clamp_min(1e-30)
    return (errors.quantile(7 / 8) if dtype.itemsize < 4 else errors.max()).item()


def not_next_token(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__}: its loss is not the mean cross entropy of the next tokens, so the ranks' losses do "
        f"not add up to it: {why}. Use a model ...ForCausalLM, or one without a head and a loss of your own"
    )


def _mixes(model: PreTrainedModel, how: str) -> ValueError:
    return ValueError(f"{type(model).__name__} mixes tokens by other means than attention: {how}. It cannot be sharded")
