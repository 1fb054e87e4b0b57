"""Around a divided model's forward: what would train wrongly is refused, and the layers learn of the call."""

from __future__ import annotations

import inspect
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cp_plugin.attention import agreement
from cp_plugin.common.eager import eager
from cp_plugin.core.mask import document_bounds
from cp_plugin.core.tree import Tree
from cp_plugin.huggingface.attention import Call, Division, refuse
from cp_plugin.huggingface.batch import DIGEST, IGNORED, starts
from cp_plugin.huggingface.rows import ASKED, ROWS, of_own_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Forward:
    """The ``forward`` of a divided model. Wrappers such as PEFT's call it directly, where hooks would be passed by."""

    def __init__(self, model: PreTrainedModel, division: Division, handles: list[Any]) -> None:
        self.model, self.division, self.handles = model, division, handles
        self.calls = agreement.Calls()
        update_wrapper(self, type(model).forward.__get__(model))  # its signature, too

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        from copy import deepcopy

        return Forward(deepcopy(self.model, memo), self.division, [])

    def __reduce__(self) -> Any:
        return self.division.__reduce__()

    def __call__(self, *args: Any, **named: Any) -> Any:
        original = type(self.model).forward
        if self.model.config._attn_implementation != self.division.name or self.division.probe is not None:
            return original(self.model, *args, **{key: x for key, x in named.items() if key not in (DIGEST, ROWS)})
        named = self._by_name(args) | named
        if ROWS in named:
            return of_own_rows(self.division.cp, self, self.model.training, named)
        if (asked := named.pop(ASKED, None)) is not None:
            return asked.of(self, named)
        named = self.before(named)
        output = original(self.model, **named)
        self.after(named, output)
        return output

    def _by_name(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(list(self._parameters())[1:], args, strict=False))

    def _parameters(self) -> Any:
        return inspect.signature(type(self.model).forward).parameters

    @eager
    def before(self, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the model.

        Raises:
            ValueError: for what would be wrong without an error.
        """
        problem = None
        try:
            self._check(named)
        except ValueError as error:
            problem = error
        if self.division.cp.size > 1:
            try:
                agreement.check(self.division.cp.mesh, self.calls, lambda: self._compared(named, problem is not None))
            except ValueError:
                if problem is None:
                    raise
        if problem is not None:
            raise problem
        return self._prepared(named)

    def _check(self, named: dict[str, Any]) -> None:
        name, config, parameters = type(self.model).__name__, self.model.config, self._parameters()
        positions, tree = named.get("position_ids"), named.get("tree")
        cached = any(named.get(cache) is not None for cache in ("past_key_values", "cache", "cache_params"))
        if positions is None or not self._are_here(positions, named, tree):
            virtual = (
                ". Prompt tuning and similar methods would add their virtual tokens to every shard: use LoRA, or "
                "huggingface.undo(model)"
            )
            raise ValueError(
                "position_ids must be those of this rank's tokens: call model(**huggingface.shard(cp, ...)), and pass "
                "positions of packed documents to shard" + virtual * (cached or named.get("inputs_embeds") is not None)
            )
        refuse(cached, "a key/value cache: train with use_cache=False")
        if named.get("labels") is not None and named.get("shift_labels") is None:
            raise ValueError("labels would be shifted inside each shard: call model(**huggingface.shard(cp, ...))")
        if named.get("labels") is None and named.get("shift_labels") is not None:
            raise ValueError(
                "shift_labels without labels: label smoothing would shift the labels a second time; set "
                "label_smoothing_factor=0, or leave shift_labels out and compute the loss of the logits yourself"
            )
        if tree is not None and "logits_to_keep" not in parameters:
            raise ValueError(
                f"{name} takes no logits_to_keep, which lets the end of a prompt predict several answers: it cannot "
                "train on a tree"
            )
        refuse_router_losses(config, named)
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor):
            refuse(mask.dim() != 2, "a custom mask")
            refuse(
                mask.shape != positions.shape, f"an attention_mask of {list(mask.shape)} for {list(positions.shape)}"
            )
            refuse(not bool(mask.all()), "padding: pack or truncate the sequences")
        else:
            refuse(mask is not None, "a custom mask")

    def _are_here(self, positions: Tensor, named: dict[str, Any], tree: Tree | None) -> bool:
        cp, tokens = self.division.cp, positions.size(-1) * self.division.cp.size
        bounds = document_bounds(named.get("cu_seq_lens_q"), tokens)
        if tree is not None:
            if tree.seq_length != tokens:
                return False
            allowed = [cp.shard(tree.position_ids())]
        else:
            running = self.division.on(bounds).positions(tokens)
            allowed = [running - starts(bounds, running), running] if bounds else [running]
        positions = positions.cpu()
        return any(torch.equal(positions, here.expand(positions.shape)) for here in allowed)

    def _prepared(self, named: dict[str, Any]) -> dict[str, Any]:
        division, positions = self.division, named["position_ids"]
        tokens = positions.size(-1) * division.cp.size
        bounds = document_bounds(named.get("cu_seq_lens_q"), tokens)
        named = {key: x for key, x in named.items() if key not in (*_PACKS, DIGEST)}
        if bounds and division.linear is not None:
            named["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32)
        if "use_cache" in self._parameters():
            named.setdefault("use_cache", False)
        # with a mask, transformers does not look for documents among the positions of a shard
        named["attention_mask"] = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
        shift_labels = named.get("shift_labels")
        if shift_labels is not None and named.get("num_items_in_batch") is None:
            labelled = (shift_labels != IGNORED).sum()
            named["num_items_in_batch"] = agreement.gathered(division.cp.mesh, labelled.view(1)).sum()
        last = positions.max() if bounds or "tree" in named else tokens - 1
        if isinstance(last, Tensor):
            last = agreement.gathered(division.cp.mesh, last.view(1)).max().item()
        division.call = Call(tokens, int(last), bounds)
        division.ignored.clear()
        return named

    @eager
    def after(self, named: dict[str, Any], output: Any) -> None:
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

    def _compared(self, named: dict[str, Any], refused: bool) -> dict[str, Any]:
        digests = named.get(DIGEST)
        labels = named.get("shift_labels")
        return {
            "a refused call": refused,
            "input_ids": None if digests is None else digests[0],
            "labels": None if digests is None else digests[1],
            "num_items_in_batch": named.get("num_items_in_batch"),
            "shape of position_ids": tuple(getattr(named.get("position_ids"), "shape", ())),
            "documents": getattr(named.get("cu_seq_lens_q"), "tolist", tuple)(),
            "tree": repr(named.get("tree")),
            "labels or none": labels is not None,
            "arguments": sorted(key for key, x in named.items() if x is not None),
            "model.training": self.model.training,
            "config": _plain(vars(self.model.config)),
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "autocast": repr(autocast_dtype(named.get("position_ids"))),
        }


def refuse_router_losses(config: Any, named: dict[str, Any]) -> None:
    """At each call, since both may change later."""
    wanted = named.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if wanted is None else wanted:
        raise ValueError("output_router_logits: each rank would balance only its own tokens; set it to False")


def autocast_dtype(x: Tensor | None) -> torch.dtype | None:
    device = "cpu" if x is None else x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _plain(values: dict[str, Any]) -> str:
    kinds = (int, float, str, bool, list, tuple, dict, type(None))
    return repr({key: x for key, x in sorted(values.items()) if isinstance(x, kinds) and not key.startswith("_")})
