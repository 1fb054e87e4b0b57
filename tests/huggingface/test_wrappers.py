"""What users do to a model beside training it: autocast, copies, saving, PEFT, compilation, another provider.

Kind: a divided model is a module like any other, and each of these works, or says in one sentence why it does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import CONVOLUTION, DELTA_NET, EXPERTS, difference, model_of, needs_transformers, summed, tokens, train

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import run_ranks

pytestmark = needs_transformers
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed (ci/huggingface.sh)")
BATCH = {"input_ids": tokens(), "labels": tokens()}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen 3": ("qwen3", {}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "num_local_experts": 2}),
    "LFM 2": ("lfm2", CONVOLUTION),
    "Qwen 3.5": ("qwen3_5_text", DELTA_NET),
}


def on_two(rank: Callable[[ContextParallel], Any]) -> list[Any]:
    return run_ranks(lambda: rank(ContextParallel("ring", group=dist.group.WORLD)), 2, init_process_group=True)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    kind, more = MODELS[name]
    model = model_of(kind, **more)

    def under(**batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch)

    one = train(model, BATCH, under)

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        return difference(summed(train(model, huggingface.shard(cp, tokens()), under)), one)

    assert max(on_two(rank)) <= 0.05  # rounding of bfloat16, in sums of another order


def test_applied_again_it_takes_the_other_provider() -> None:
    model = model_of("llama")
    one = train(model, BATCH)

    def rank(cp: ContextParallel) -> list[float]:
        differences = []
        for other in (cp, *(ContextParallel(name, group=dist.group.WORLD) for name in ("needed", "striped"))):
            huggingface.apply(model, other)
            differences.append(difference(summed(train(model, huggingface.shard(other, tokens()))), one))
        huggingface.undo(model)
        assert "forward" not in vars(model) and model.config._attn_implementation == "sdpa"
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
        return [*differences, difference(train(model, BATCH), one)]

    for differences in on_two(rank):
        assert max(differences) <= 1e-5, differences


@pytest.mark.parametrize("name", ["Llama", "LFM 2"])
def test_a_copy_is_divided_too(name: str) -> None:
    """As moving averages and DPO's reference models are made."""
    kind, more = MODELS[name]
    model = model_of(kind, **more)
    one = train(model, BATCH)

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        other = copy.deepcopy(model)
        assert vars(other)["forward"].__self__ is other
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        return difference(summed(train(other, huggingface.shard(cp, tokens()))), one)

    assert max(on_two(rank)) <= 1e-5


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

    on_two(rank)
    loaded = type(model).from_pretrained(tmp_path / "0")
    assert torch.equal(loaded(input_ids=tokens()).logits, model.eval()(input_ids=tokens()).logits)


@needs_peft
@pytest.mark.parametrize("first", ["LoRA", "division"])
def test_lora(first: str) -> None:
    """PEFT calls the model's ``forward``, past all hooks: what is checked at each call must be checked here, too."""
    import peft

    def adapted(model: Any) -> Any:
        torch.manual_seed(2)
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    one = train(adapted(model_of("llama")), BATCH)

    def rank(cp: ContextParallel) -> float:
        model = model_of("llama")
        if first == "LoRA":
            model = adapted(model)
            huggingface.apply(model, cp)
        else:
            huggingface.apply(model, cp)
            model = adapted(model)
        with pytest.raises(ValueError, match="position_ids must be those"):
            model(input_ids=tokens(), labels=tokens())
        return difference(summed(train(model, huggingface.shard(cp, tokens()))), one)

    assert max(on_two(rank)) <= 1e-5


@needs_peft
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_are_refused_in_one_sentence(kind: str) -> None:
    import peft

    def rank(cp: ContextParallel) -> str:
        model = model_of("llama")
        huggingface.apply(model, cp)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        with pytest.raises(ValueError) as raised:
            peft.get_peft_model(model, config)(**huggingface.shard(cp, tokens()))
        return str(raised.value)

    for text in on_two(rank):
        assert "Prompt tuning and similar methods would add their virtual tokens to every shard" in text, text


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "gpt-oss", "LFM 2"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    kind, more = MODELS[name]
    model = model_of(kind, **more)
    one = train(model, BATCH)

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return difference(summed(train(model, huggingface.shard(cp, tokens()))), one)

    assert max(on_two(rank)) <= 1e-5


def test_documents_survive_a_second_call_before_the_backward() -> None:
    """Two packs, one backward, recomputed: each layer sees the documents of its own call."""
    model = model_of("llama")
    packs = [torch.cat([torch.arange(n) for n in lengths])[None] for lengths in ((20, 44), (40, 24))]
    ids = tokens(64, 1)

    def losses(call: Callable[..., Any]) -> torch.Tensor:
        return sum(call(positions) for positions in packs)

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    class Two(torch.nn.Module):
        loss: torch.Tensor

    def alone(**batch: Any) -> Two:
        both = Two()
        both.loss = losses(lambda positions: model(input_ids=ids, labels=ids, position_ids=positions).loss)
        return both

    one = train(model, {}, alone)

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)

        def divided(**batch: Any) -> Two:
            both = Two()
            shard = huggingface.shard
            both.loss = losses(lambda positions: model(**shard(cp, ids, position_ids=positions)).loss)
            return both

        return difference(summed(train(model, {}, divided)), one)

    assert max(on_two(rank)) <= 1e-5
