"""Around a divided model's forward: what would train wrongly is refused, and the layers learn of the call."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cp_plugin.engine.attention import agreement
from cp_plugin.engine.attention.convolution import copied
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.core.mask import document_bounds
from cp_plugin.engine.core.tree import Tree
from cp_plugin.huggingface.additions import Additions
from cp_plugin.huggingface.attention import UNSUPPORTED, Call, Division, ShardMark, placed, refuse
from cp_plugin.huggingface.batch import DIGEST, IGNORED, starts
from cp_plugin.huggingface.rows import ASKED, BOUNDS, ROWS, run_own_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHES = ("past_key_values", "cache", "cache_params")
_DIVIDED = "_cp_plugin"
"""Attribute of a module whose ``forward`` is divided: its ``Forward``."""
_COMPARED = r"attention|attn|window|chunk|block|local|position|context|rope|rotary|layer|head|scal|cap|causal|mask|"
_COMPARED += r"dropout|router|expert"
"""In the names of settings that ranks must have alike; saving, for one, changes others on the rank that does it."""

_POSITIONS = (
    "position_ids must be those of this rank's tokens: call model(**huggingface.shard(cp, ...)), and pass positions of "
    "packed documents to shard"
)
_VIRTUAL = (
    ". Prompt tuning and similar methods would add their virtual tokens to every shard: use LoRA, or "
    "huggingface.undo(model)"
)


class Forward:
    """The ``forward`` of a divided model, or of an inner one: any of them may be called. Wrappers such as PEFT's call
    it directly, where hooks would be passed by. Whoever has patched the instance's ``forward`` before is called by it,
    and whoever does later calls it.
    """

    def __init__(self, model: PreTrainedModel, division: Division, whole: PreTrainedModel) -> None:
        self.model, self.division, self.whole = model, division, whole
        self.handles: list[Any] = []
        self.additions: Additions | None = None
        self.noise: tuple[Any, float] | None = None
        self.method, self.own = _method(model)
        vars(model)[_DIVIDED] = self
        model.forward = MethodType(self.method, model)

    def remove(self) -> None:
        """Give the model its own forward back. A wrapper may have kept this one, which then is the model's own."""
        for handle in self.handles:
            handle.remove()
        del vars(self.model)[_DIVIDED]
        if getattr(vars(self.model).get("forward"), "__func__", None) is self.method:
            del self.model.forward
            if (own := self.own(self.model)) != self.model.forward:
                self.model.forward = own
        if self.division.active:
            self.model.set_attn_implementation(self.division.before)

    def __call__(self, *args: Any, **named: Any) -> Any:
        _skip(Forward.__call__)
        division = self.division
        if not division.active or division.inside:
            return self.own(self.model)(*args, **{key: x for key, x in named.items() if key not in (DIGEST, ROWS)})
        named = dict(zip(self.parameters(), args, strict=False)) | named
        if division.probe is not None:
            return self.run(named)
        if ROWS in named:
            return run_own_rows(division.cp, self, self.model.training, named)
        request = named.pop(ASKED, None)
        additions = self.additions if division.calls.is_next_compared() else None
        with nullcontext() if additions is None else additions.examined(division):
            return self.run(named) if request is None else request.compute(self, named)

    def run(self, named: dict[str, Any]) -> Any:
        """A call for a shard."""
        _skip(Forward.run)
        probed = self.division.probe is not None
        if not probed:
            named = self.prepare(named)
        try:
            self._begin(named)
            output = self.own(self.model)(**named)
            if not probed:
                self.check_output(named, output)
        finally:
            self._end()
        return output

    def parameters(self) -> dict[str, None]:
        """Names of the arguments of the forward that is called, in order, and of those that it may pass on."""
        called, usual = (inspect.signature(f).parameters for f in (self.own(self.model), type(self.model).forward))
        named = [name for name, x in called.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        return dict.fromkeys([*named, *list(usual)[1:]])

    def _passed_by(self) -> bool:
        """Return True if this inner model is called by a forward of the whole one that replaced the divided one.

        With rows of each rank's own that is right: it gets hidden states of its rows.
        """
        ends = (getattr(vars(self.whole).get("forward"), "__code__", None), run_own_rows.__code__)
        ours = ends[0] is getattr(self.method, "__code__", None)  # that of all divided forwards
        frame = None if ours or self.whole is self.model else sys._getframe()
        while frame is not None and frame.f_code not in ends:
            frame = frame.f_back
        return frame is not None and frame.f_code is ends[0]

    @eager
    def prepare(self, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the model; ValueError for what would be wrong without an error."""
        refused = None
        try:
            if self.division.calls.is_next_compared():
                for message in list(self.division.required):
                    if not bool(self.division.required.pop(message)):
                        raise ValueError(f"in an earlier call: {message}")
            self._check(named)
        except ValueError as error:
            refused = error
        agreement.check(self.division.cp.mesh, self.division.calls, lambda: self._compared(named), refused)
        return self._prepared(named)

    def _check(self, named: dict[str, Any]) -> None:
        name, config, parameters = type(self.model).__name__, self.model.config, self.parameters()
        positions, tree = named.get("position_ids"), named.get("tree")
        if self._passed_by():
            raise ValueError(
                f"the forward of {type(self.whole).__name__} was replaced after huggingface.apply by one that does not "
                "call it: call apply again, last"
            )
        cached = any(not isinstance(named.get(cache), ShardMark | None) for cache in _CACHES)
        fit = torch.tensor(False) if positions is None else self._fit(positions, named, tree)
        self._require(fit, _POSITIONS + _VIRTUAL * (cached or named.get("inputs_embeds") is not None))
        refuse(cached, "a key/value cache: train with use_cache=False")
        if named.get("labels") is not None and named.get("shift_labels") is None:
            raise ValueError("labels would be shifted inside each shard: call model(**huggingface.shard(cp, ...))")
        if named.get("labels") is None and named.get("shift_labels") is not None:
            raise ValueError(
                "shift_labels without labels: label smoothing would shift the labels a second time; set "
                "label_smoothing_factor=0, or leave shift_labels out and compute the loss of the logits yourself"
            )
        if tree is not None and named.get("labels") is not None and "logits_to_keep" not in parameters:
            raise ValueError(
                f"{name} takes no logits_to_keep, which lets the end of a prompt predict several answers: it cannot "
                "train on a tree"
            )
        refuse_router_losses(config, named)
        mask = named.get("attention_mask")
        if mask is not None and positions is not None:
            refuse(not isinstance(mask, Tensor) or mask.dim() != 2, "a custom mask")
            refuse(
                mask.shape != positions.shape, f"an attention_mask of {list(mask.shape)} for {list(positions.shape)}"
            )
            self._require(mask.all(), UNSUPPORTED.format("padding: pack or truncate the sequences"))

    def _require(self, holds: Tensor, message: str) -> None:
        """At once on the CPU and in compared calls; else by the next of these, so that the host need not wait.
        ValueError with the message, if something is required that does not hold."""
        required = self.division.required
        if holds.device.type == "cuda" and not self.division.calls.is_next_compared():
            required[message] = holds & required.get(message, holds)
        elif not bool(holds):
            raise ValueError(message)

    def _fit(self, positions: Tensor, named: dict[str, Any], tree: Tree | None) -> Tensor:
        """Bool: whether these are positions of this rank's tokens."""
        cp, tokens = self.division.cp, positions.size(-1) * self.division.cp.size
        if tree is not None:
            if tree.seq_length != tokens:
                return torch.tensor(False)
            return (positions == copied(cp.shard(tree.position_ids()), positions.device)).all()
        bounds = self._documents(named, tokens)
        running = placed(self.division.cp, bounds).positions(tokens, positions.device)
        fit = (positions == running).all()
        return fit | (positions == running - starts(bounds, running)).all() if bounds else fit

    def _documents(self, named: dict[str, Any], tokens: int) -> tuple[int, ...]:
        """Bounds of documents, of which the host knows those of ``shard`` without asking the device."""
        bounds, mark = named.get("cu_seq_lens_q"), named.get(_CACHES[0])
        known = mark.documents if isinstance(mark, ShardMark) else ()
        if bounds is None or bounds.device.type == "cpu" or len(bounds) != len(known) or known[-1:] != (tokens,):
            return document_bounds(bounds, tokens)
        same = copied(torch.tensor(known, dtype=bounds.dtype), bounds.device) == bounds
        self._require(same.all(), "cu_seq_lens_q must be those of huggingface.shard")
        return known

    def _prepared(self, named: dict[str, Any]) -> dict[str, Any]:
        division, positions = self.division, named["position_ids"]
        tokens = positions.size(-1) * division.cp.size
        bounds = self._documents(named, tokens)
        named = {key: x for key, x in named.items() if key not in (*BOUNDS, DIGEST) and not isinstance(x, ShardMark)}
        if bounds and division.linear is not None:
            named["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32)
        if "use_cache" in self.parameters():
            named.setdefault("use_cache", False)
        # with a mask, transformers does not look for documents among the positions of a shard
        named["attention_mask"] = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
        shift_labels = named.get("shift_labels")
        if shift_labels is not None and named.get("num_items_in_batch") is None:
            labelled = (shift_labels != IGNORED).sum()
            named["num_items_in_batch"] = agreement.gathered(division.cp.mesh, labelled.view(1)).sum()
        last = positions.max() if bounds or "tree" in named else tokens - 1
        if isinstance(last, Tensor):
            last = agreement.gathered(division.cp.mesh, last.view(1)).max()
        division.call = Call(tokens, last, bounds)
        division.ignored.clear()
        return named

    @eager
    def _begin(self, named: dict[str, Any]) -> None:
        """The noise of NEFTune is relative to the length of the whole sequence."""
        division = self.division
        division.inside = True
        ids = next((x for key in ("input_ids", "inputs_embeds") if (x := named.get(key)) is not None), None)
        with suppress(NotImplementedError):
            layer = self.model.get_input_embeddings()
            if ids is not None and (alpha := getattr(layer, "neftune_noise_alpha", None)) is not None:
                self.noise = layer, alpha
                layer.neftune_noise_alpha = alpha * (ids.size(1) / (division.call.seq_length or ids.size(1))) ** 0.5

    @eager
    def _end(self) -> None:
        division = self.division
        division.inside = False
        if division.probe is None:
            division.call = None
        if self.noise is not None:
            self.noise[0].neftune_noise_alpha, self.noise = self.noise[1], None

    @eager
    def check_output(self, named: dict[str, Any], output: Any) -> None:
        """A model may swallow an argument that it does not know, or add to its loss what it was not asked for."""
        name, ignored = type(self.model).__name__, self.division.ignored
        if named.get("tree") is not None and "tree" in ignored:
            raise ValueError(f"{name} does not pass `tree` on to its attention: it cannot train on one")
        if len(self.division.call.documents) > 2 and "cu_seq_lens_q" in ignored:
            raise ValueError(
                f"{name} does not pass `cu_seq_lens_q` on to its linear layers: it cannot train on documents"
            )
        for loss in ("aux_loss", "z_loss", "router_loss"):
            refuse(getattr(output, loss, None) is not None, f"{loss}: each rank would balance only its own tokens")

    def _compared(self, named: dict[str, Any]) -> dict[str, Any]:
        digests, positions = named.get(DIGEST), named.get("position_ids")
        device = "cpu" if positions is None else positions.device.type
        return {
            "input_ids": None if digests is None else digests[0],
            "labels": None if digests is None else digests[1],
            "num_items_in_batch": named.get("num_items_in_batch"),
            "shape of position_ids": tuple(getattr(positions, "shape", ())),
            "documents": getattr(named.get("cu_seq_lens_q"), "tolist", tuple)(),
            "tree": repr(named.get("tree")),
            "arguments": sorted(key for key, x in named.items() if x is not None),
            "model.training": self.model.training,
            "config": _plain(vars(self.division.config)),
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "autocast": repr(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None),
        }


def _method(model: PreTrainedModel) -> tuple[Callable[..., Any], Callable[[Any], Callable[..., Any]]]:
    """A ``forward`` for the instance, and what gives an instance the one it had.

    It is a method, so that its wrappers and copies belong to the instance that they are called with.
    """
    had: Any = vars(model).get("forward")
    bound = isinstance(had, MethodType) and had.__self__ is model

    def own(self: PreTrainedModel) -> Callable[..., Any]:
        return MethodType(type(self).forward if had is None else had.__func__, self) if bound or had is None else had

    def forward(self: PreTrainedModel, *args: Any, **named: Any) -> Any:
        _skip(forward)
        divided = vars(self).get(_DIVIDED)
        if divided is None or divided.method is not forward:
            return own(self)(*args, **named)
        return divided(*args, **named)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    signature = inspect.signature(own(model))
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward, own


def _skip(function: Any) -> None:
    """Hide the frame from torch.compile, but not what it calls."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo.eval_frame"].skip_code(function.__code__)


def forwards(model: nn.Module) -> list[Forward]:
    """Return the forwards of the divided models in a model."""
    return [vars(layer)[_DIVIDED] for layer in model.modules() if _DIVIDED in vars(layer)]


def refuse_router_losses(config: Any, named: dict[str, Any]) -> None:
    """At each call, since both may change later."""
    wanted = named.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if wanted is None else wanted:
        raise ValueError("output_router_logits: each rank would balance only its own tokens; set it to False")


def _plain(values: dict[str, Any]) -> str:
    kinds = (int, float, str, bool, list, tuple, dict, type(None))
    public = {key: x for key, x in sorted(values.items()) if not key.startswith("_")}
    return repr({key: x for key, x in public.items() if isinstance(x, kinds) and re.search(_COMPARED, key)})
