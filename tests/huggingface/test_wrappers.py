"""What users do to a model beside training: autocast, copies, saving, PEFT, another provider."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import (
    Trained,
    compare,
    difference,
    differs,
    divided,
    model_of,
    needs_transformers,
    pack,
    raised,
    run_on_ranks,
    summed,
    tokens,
    train,
)

from cp_plugin import ContextParallel, huggingface

pytestmark = needs_transformers
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed (ci/huggingface.sh)")
BATCH = {"input_ids": tokens(), "labels": tokens()}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss", "lfm2", "qwen3_5_text"])
def test_autocast(kind: str) -> None:
    autocast = torch.autocast("cpu", torch.bfloat16)
    error = differs(model_of(kind), call=lambda model: autocast(model.__call__))
    assert error <= 0.05  # rounding of bfloat16, in sums of another order


def copied(model: Any) -> Any:
    """As moving averages and DPO's reference models are made."""
    other = copy.deepcopy(model)
    assert vars(other)["forward"].__self__ is other
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return other


def recomputed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


DONE: dict[str, Callable[[Any], Any]] = {
    "copied": copied,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
}


@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "lfm2"])
def test_what_is_done_to_a_divided_model_changes_nothing(kind: str, done: str) -> None:
    assert differs(model_of(kind), then=DONE[done]) <= 1e-5


@pytest.mark.parametrize("kind", ["llama", "lfm2", "qwen3_5_text"])
def test_a_model_knows_whether_and_how_it_is_divided(kind: str) -> None:
    """Never, not any more, by a copy of it, with a wrapper around its forward, or otherwise than before: a shard is
    refused by name, and whole batches give what they gave (the hooks of hybrids stayed: 35 % off). A forward of the
    instance's own, as Liger, unsloth, autocast and TRL's heads set one, is called by all (``undo`` deleted it)."""
    one = train(model_of(kind), BATCH)

    def rank(cp: ContextParallel) -> list[float]:
        models = {how: model_of(kind) for how in ("never", "patched", "undone", "set back", "copied", "wrapped")}
        usual, calls = models["patched"].forward, []
        models["patched"].forward = MethodType(
            lambda self, **batch: calls.append(self) or usual(**batch), models["patched"]
        )
        for how, model in models.items():
            if how != "never":
                huggingface.apply(model, cp)
        models["set back"].set_attn_implementation("sdpa")
        still = models["copied"]
        models["copied"], again = copy.deepcopy(still), copy.deepcopy(still)
        wrapped = models["wrapped"].forward
        models["wrapped"].forward = lambda **batch: wrapped(**batch)
        assert calls
        calls.clear()
        for how in ("patched", "undone", "copied", "wrapped"):
            huggingface.undo(models[how])
        assert "forward" not in vars(undone := models["undone"]) and undone.config._attn_implementation == "sdpa"
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in undone.modules())
        batch, differences = huggingface.shard(cp, tokens()), []
        for model in models.values():
            with pytest.raises(ValueError, match="a model that is not divided: call huggingface"):
                model(**batch)
            differences.append(difference(train(model, BATCH), one))
        assert calls == [models["patched"]] * 2
        other = ContextParallel("needed", group=dist.group.WORLD, layout="zigzag")
        huggingface.apply(again, other)
        for model, place in ((still, cp), (again, other)):
            differences.append(compare(model, huggingface.shard(place, tokens()), one))
        return differences

    for differences in run_on_ranks(rank):
        assert max(differences) <= 2e-5, differences


def test_a_wrapper_of_two_models_is_refused() -> None:
    both = torch.nn.ModuleDict({"one": model_of("llama"), "other": model_of("qwen3")})
    with pytest.raises(ValueError, match=r"contains 2 \(LlamaForCausalLM, Qwen3ForCausalLM\): apply to each of them"):
        huggingface.apply(both, ContextParallel("ring"))


def adapted(model: Any, init_lora_weights: bool = False) -> Any:
    import peft

    torch.manual_seed(2)
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=init_lora_weights)
    return peft.get_peft_model(model, config)


ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "base model": lambda model: model.model,
    "decoder": lambda model: model.get_decoder(),
    "forward of the base model": lambda model: model.model.forward,
    "LoRA's inner model": lambda model: adapted(model, init_lora_weights=True).get_base_model().model,
}


@needs_peft
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_entrance_has_documents_of_its_own(entrance: str) -> None:
    """An inner model attended within the documents of the last call: 26 to 39 % off."""
    ids = tokens(64, 1)
    inner = model_of("llama").eval().model
    each = [inner(input_ids=ids[:, a:b]).last_hidden_state.detach() for a, b in ((0, 20), (20, 64))]
    whole, packed = inner(input_ids=ids).last_hidden_state.detach(), torch.cat(each, 1)

    def rank(cp: ContextParallel) -> None:
        model = divided(cp).eval()
        enter = ENTRANCES[entrance](model)
        for want, positions in ((whole, None), (packed, pack(20, 44)["position_ids"]), (whole, None)):
            model(**huggingface.shard(cp, ids, position_ids=pack(32, 32)["position_ids"]))
            batch = huggingface.shard(cp, ids, position_ids=positions)
            got = cp.unshard(enter(**batch).last_hidden_state.detach(), 1)
            assert (got - want).norm() / want.norm() <= 1e-5
        with pytest.raises(ValueError, match="position_ids must be those of this rank's tokens"):
            enter(input_ids=batch["input_ids"])
        states = torch.zeros(1, 32, 64)
        with pytest.raises(ValueError, match="run outside of a call of the model"):
            model.model.layers[0](states, position_embeddings=(states[..., :16], states[..., :16]))

    run_on_ranks(rank)


def mixed(layer: Any, args: Any, output: Any) -> Any:
    return output + 0.1 * output.roll(1, 1)


def halved(logits: Any, labels: Any, vocab_size: int, **named: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2


def squared(layer: Any, args: Any, output: Any) -> None:
    output.mul_(output.size(1))


LATER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a hook": (lambda model: model.model.norm.register_forward_hook(mixed), "mixed, a hook of .*mixes tokens"),
    "in place": (lambda model: model.model.norm.register_forward_hook(squared), "squared, a hook of .*on shards"),
    "a loss": (lambda model: setattr(model, "loss_function", halved), "halved, the loss_function: .*its loss is not"),
    "a forward": (
        lambda model: setattr(
            model.lm_head, "forward", lambda x: model.lm_head.weight.new_ones(97) * x.cumsum(1).sum(-1, True)
        ),
        "the forward of lm_head: .*mixes tokens",
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_what_is_set_after_apply_is_examined(what: str) -> None:
    """On one rank only, too; hooks that only look neither stop a run nor see other calls than its own."""
    change, message = LATER[what]

    def rank(cp: ContextParallel) -> str:
        model, seen = divided(cp), []
        batch = huggingface.shard(cp, tokens())
        if cp.index:
            model.lm_head.register_forward_hook(lambda *args: seen.append(1))
        model(**batch)
        assert len(seen) == cp.index
        if cp.index or what == "a loss":
            change(model)
        return raised(lambda: model(**batch))

    assert re.search(message, run_on_ranks(rank)[1])


def test_noise_of_embeddings_is_that_of_the_whole_length() -> None:
    from transformers.integrations.neftune import activate_neftune

    def rank(cp: ContextParallel) -> float:
        model, sizes = divided(cp), []
        activate_neftune(model, 5.0)
        model.get_input_embeddings().register_forward_hook(
            lambda layer, args, output: sizes.append(float((output - layer.weight[args[0]]).abs().max().detach()))
        )
        model(**huggingface.shard(cp, tokens()))
        assert model.get_input_embeddings().neftune_noise_alpha == 5.0
        return sizes[0]

    for size in run_on_ranks(rank):
        assert 0.95 <= size / (5.0 / (64 * 64) ** 0.5) <= 1


def test_saving(tmp_path: Path) -> None:
    model = model_of("llama")

    def rank(cp: ContextParallel) -> None:
        huggingface.apply(model, cp)
        with pytest.raises(ValueError, match=r"save it with model\.save_pretrained\(\.\.\.\) or model\.state_dict\(\)"):
            torch.save(model, tmp_path / f"model{cp.index}")
        torch.save(model.state_dict(), tmp_path / f"state{cp.index}")
        model.save_pretrained(tmp_path / str(cp.index))
        assert cp.index or "cp_plugin" not in (tmp_path / "0" / "config.json").read_text()
        huggingface.undo(model)
        torch.save(model, tmp_path / f"model{cp.index}")

    run_on_ranks(rank)
    loaded = type(model).from_pretrained(tmp_path / "0")
    assert torch.equal(loaded(input_ids=tokens()).logits, model.eval()(input_ids=tokens()).logits)


@needs_peft
@pytest.mark.parametrize("first", ["LoRA", "division"])
def test_lora(first: str) -> None:
    """PEFT calls the model's ``forward``, past all hooks: what is checked at each call must be checked here, too."""
    one = train(adapted(model_of("llama")), BATCH)

    def rank(cp: ContextParallel) -> float:
        model = adapted(model_of("llama")) if first == "LoRA" else model_of("llama")
        huggingface.apply(model, cp)
        model = model if first == "LoRA" else adapted(model)
        with pytest.raises(ValueError, match="position_ids must be those"):
            model(input_ids=tokens(), labels=tokens())
        return compare(model, huggingface.shard(cp, tokens()), one)

    assert max(run_on_ranks(rank)) <= 1e-5


@needs_peft
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_are_refused_in_one_sentence(kind: str) -> None:
    import peft

    def rank(cp: ContextParallel) -> str:
        model = divided(cp)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return raised(lambda: peft.get_peft_model(model, config)(**huggingface.shard(cp, tokens())))

    for text in run_on_ranks(rank):
        assert "Prompt tuning and similar methods would add their virtual tokens to every shard" in text, text


def test_documents_survive_a_second_call_before_the_backward() -> None:
    """Two packs, one backward, recomputed: each layer sees the documents of its own call."""
    model, ids = recomputed(model_of("llama"), reentrant=False), tokens(64, 1)
    packs = [{"input_ids": ids, "labels": ids, "position_ids": pack(*n)["position_ids"]} for n in ((20, 44), (40, 24))]

    def both(divide: Callable[..., dict[str, Any]]) -> Trained:
        return train(model, {}, lambda: SimpleNamespace(loss=sum(model(**divide(**each)).loss for each in packs)))

    one = both(dict)

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        return difference(summed(both(partial(huggingface.shard, cp))), one)

    assert max(run_on_ranks(rank)) <= 1e-5
