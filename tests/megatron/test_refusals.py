"""The table of rules: every rule refuses its example, in a message that names flag, value and fix."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rule_examples import RING, Example, check, example
from test_generation_refusals import MODELS

from cp_plugin import Options
from cp_plugin.megatron import compat
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.flags.linear_flags import Linear
from cp_plugin.megatron.rules import fields, layers, table
from cp_plugin.megatron.rules.rule import Rule
from cp_plugin.nemo import refusals as nemo

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("adapter")
PADDED = replace(RING, pad_sequence=True)
PLACED = Settings(provider="needed", options=Options(layout="documents"))
FP8 = Settings(provider="ring", options=Options(fp8="compute"))
BASE = {
    "attention_dropout": 0.0,
    "context_parallel_size": 4,
    "seq_length": 64,
    "encoder_seq_length": None,
    "calculate_per_token_loss": True,
    "use_torch_fsdp2": False,
    "num_experts": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "multi_latent_attention": False,
    "position_embedding_type": "rope",
    "apply_rope_fusion": False,
    "create_attention_mask_in_dataloader": False,
    "pipeline_model_parallel_size": 1,
    "micro_batch_size": 2,
    "spec": None,
    "deterministic_mode": False,
    "num_layers": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "num_attention_heads": 4,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "window_size": None,
    "fp8_dot_product_attention": False,
}
"""Arguments of a run to which no rule applies."""


def attribute(flag: str) -> str:
    return flag.removeprefix("linear ").removeprefix("--").replace("-", "_")


SWITCHES = """
--rl-use-sequence-packing --reset-attention-mask --reset-position-ids --cache-mla-latents --mla-down-proj-fusion
--qk-clip --log-max-attention-logit --use-kitchen-attention --batch-invariant-mode --fp8-dot-product-attention
--fp8-multi-head-attention --fine-grained-activation-offloading --is-hybrid-model
--hybrid-context-parallel --dynamic-context-parallel --fake-process-group --enable-cuda-graph --external-cuda-graph
--overlap-moe-expert-parallel-comm --perform-rl-step --log-straggler
"""
FLAGS = dict.fromkeys(SWITCHES.split(), True) | {
    "--attention-dropout": 0.1,
    "--max-seqlen-per-dp-cp-rank": 4096,
    "--sequence-packing-scheduler": "dp_balanced",
    "--pad-packed-seq-alignment": 16,
    "--cp-partition-mode": "contiguous",
    "--experimental-attention-variant": "dsa",
    "--attention-backend": "local",
    "--position-embedding-type": "relative",
    "--cpu-offloading-num-layers": 1,
    "--rerun-mode": "report_stats",
    "--linear-attention-freq": 2,
    "--heterogeneous-layers-config-path": "x.json",
    "--heterogeneous-layers-config-encoded-json": "{}",
    "--transformer-impl": "inference_optimized",
    "--hierarchical-context-parallel-sizes": [2, 2],
    "--cp-comm-type": ["a2a"],
    "--cuda-graph-impl": "local",
    "--logits-save-dir": "x",
    "--logits-load-dir": "x",
    "linear --mtp-num-layers": 1,
    "linear --hybrid-layer-pattern": "M*",
    "linear --hybrid-override-pattern": "M*",
    "linear --multi-latent-attention": True,
    "linear --init-model-with-meta-device": True,
    "linear --use-megatron-fsdp": True,
    "linear --use-torch-fsdp2": True,
}
ROUTED = {
    "seq_length": 62,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_enable_expert_bias": False,
    "tp_comm_overlap": False,
}


def padded(names: str, **args: Any) -> Example:
    return example(names, settings=PADDED, **ROUTED | args)


RUNS = {
    "fields that the plugin does not know": example("--add-qkv-bias: Megatron's own", add_qkv_bias=True),
    "position embeddings of MLA": example(
        "--position-embedding-type yarn", multi_latent_attention=True, position_embedding_type="yarn"
    ),
    "hybrid D": example("D in --hybrid-layer-pattern D*", hybrid_layer_pattern="D*"),
    "local attention of the dev branch": example(
        "setting --cp-comm-type to all_gather",
        fallback_to_eager_attn=False,
        transformer_impl="local",
        cp_comm_type=["p2p"],
    ),
    "exchange of gated delta net": example("--cp-comm-type is unset", hybrid_layer_pattern="G*", cp_comm_type=["p2p"]),
    "chunks of gated delta net": example(
        "setting --linear-cp-mode to headwise", hybrid_layer_pattern="G*", linear_cp_mode="chunkwise"
    ),
    "hybrid without attention": example("--hybrid-layer-pattern M-", hybrid_layer_pattern="M-"),
    "packed micro-batches in a pipeline": example(
        "--sft with --pipeline-model-parallel-size 2 and --micro-batch-size 2",
        sft=True,
        pipeline_model_parallel_size=2,
    ),
    "words of --spec": example("--spec local", spec=["local"]),
    "module of --spec": example("--spec no.such layer", spec=["no.such", "layer"]),
    "name of --spec": example("--spec json no_layer", spec=["json", "no_layer"]),
    "mask of the data loader": example(
        "--no-create-attention-mask-in-dataloader", create_attention_mask_in_dataloader=True
    ),
    "fused rotation of MLA": example("--no-rope-fusion", multi_latent_attention=True, apply_rope_fusion=True),
    "fused rotation of packed documents": example("--no-rope-fusion", sft=True, apply_rope_fusion=True),
    "blockwise FP8": example("--fp8-recipe blockwise", settings=FP8, fp8="e4m3", fp8_recipe="blockwise"),
    "custom FP8": example("--fp8-recipe custom", settings=FP8, fp8="e4m3", fp8_recipe="custom"),
    "first and last layers in bfloat16": example("--first-last-layers-bf16", settings=FP8, first_last_layers_bf16=True),
    "recipes of linear layers": example("--fp8-recipe mxfp8", settings=FP8, fp8="e4m3", fp8_recipe="mxfp8"),
    "determinism on CUDA": example("--deterministic-mode", device="cuda", deterministic_mode=True),
    "sequence length": example("--seq-length 62", seq_length=62),
    "losses of experts": example("--moe-aux-loss-coeff 0.01", version="0.18.2", num_experts=4, moe_aux_loss_coeff=0.01),
    "capacity of experts": example(
        "--moe-expert-capacity-factor 1.5: .*, or use --moe-expert-capacity-factor 2",
        **ROUTED | {"seq_length": 64, "moe_expert_capacity_factor": 1.5},
    ),
    "sinkhorn": example(
        "--moe-router-load-balancing-type sinkhorn",
        **ROUTED | {"seq_length": 64, "moe_router_load_balancing_type": ["sinkhorn"]},
    ),
    "balance of each sequence in packs": example(
        "--sft and --moe-router-load-balancing-type seq_aux_loss with --micro-batch-size 2",
        **ROUTED | {"seq_length": 64, "moe_router_load_balancing_type": "seq_aux_loss", "micro_batch_size": 2},
        moe_aux_loss_coeff=0.01,
        sft=True,
    ),
    "balancing of padding": padded(
        "--moe-router-load-balancing-type quantile_balancing with 2 tokens",
        moe_router_load_balancing_type=["quantile_balancing"],
    ),
    "expert bias and padding": padded("--moe-router-enable-expert-bias", moe_router_enable_expert_bias=True),
    "experts in padded micro-batches of packs": padded(
        "--sft and --num-experts with --micro-batch-size 3 and 2 tokens", sft=True, micro_batch_size=3
    ),
    "overlapped tensor parallelism and padding": padded("--tp-comm-overlap with 2 tokens", tp_comm_overlap=True),
    "gradients of torch's FSDP": example("--use-torch-fsdp2", use_torch_fsdp2=True),
    "gradients averaged in the collective": example("--ddp-average-in-collective", ddp_average_in_collective=True),
    "layout of attention": example(
        "--attention-cp-layout contiguous conflicts with tokens in the striped layout",
        settings=Settings(provider="striped"),
        attention_cp_layout="contiguous",
    ),
    "sizes of the model": example("--num-layers -1, --hidden-size 0", num_layers=-1, hidden_size=0),
    "documents to be placed": example("--cp-layout documents without packed documents", settings=PLACED),
    "padding that is placed with documents": example(
        "--cp-layout documents and --num-experts with 2 tokens of padding",
        settings=replace(PLACED, pad_sequence=True),
        num_experts=4,
        seq_length=61,
        sft=True,
    ),
    "multimodal positions of packs": example(
        r"--position-embedding-type mrope with packed documents \(--sft\)", sft=True, position_embedding_type="mrope"
    ),
    "layout of hybrid layers": example("--linear-cp-layout", linear_cp_layout="contiguous"),
    "losses per token": example("--calculate-per-token-loss", calculate_per_token_loss=False),
    "upstream on the CPU": example("--context-parallel-size 4", settings=Settings()),
    "linear layers": example("--cp-layer-pattern LLL has 3 letters, which does not divide --num-layers 4"),
    "linear heads": example(
        "--cp-linear-attention gla splits the key/value heads .* --tensor-model-parallel-size 4",
        tensor_model_parallel_size=4,
    ),
}
ALSO = {
    "recipes of linear layers": [example("--fp4-format", settings=FP8, fp4="e2m1")],
    "determinism on CUDA": [example("--deterministic-mode", device=None, deterministic_mode=True)],
    "capacity of experts": [
        example("--moe-expert-rank-capacity-factor 2", **ROUTED | {"seq_length": 64}, moe_expert_rank_capacity_factor=2)
    ],
    "words of --spec": [example("--spec a b c", spec=["a", "b", "c"])],
    "position embeddings of MLA": [
        example("--position-embedding-type mrope", multi_latent_attention=True, position_embedding_type="mrope")
    ],
    "losses of experts": [
        example("--moe-z-loss-coeff 0.1", version="0.18.2", num_experts=4, moe_z_loss_coeff=0.1),
        example("--moe-aux-loss-coeff", version="0.18.2", num_experts=4, moe_aux_loss_coeff=[0.0, 0.1]),
    ],
}
"""Further examples: one for each alternative of a rule."""
LAYERS = {
    "cross-attention": example("cross attention", attention_type="cross"),
    "layer with a fused rotation of MLA": example(
        "RoPE fusion", args={"multi_latent_attention": True, "apply_rope_fusion": True}
    ),
    "dropout of a layer": example("--attention-dropout 0.1", dropout=0.1),
    "FP8 attention of a layer": example("--fp8-dot-product-attention", args={"fp8_dot_product_attention": True}),
    "linear layer with a scale": example("softmax_scale 0.5", scale=0.5),
    "linear layer with a window": example("--window-size", args={"window_size": (8, 0)}),
    "linear layer with fused q, k and v": example("fused_single_qkv_rope", args={"fused_single_qkv_rope": True}),
}
Q = torch.empty(8, 2, 4, 16)
CALLS = {
    "shape of a call": example("queries of shape (8, 4, 16)", query=Q[:, 0]),
    "dynamic groups of a call": example("--hybrid-context-parallel", packed=SimpleNamespace(local_cp_size=2)),
    "partition of a pack": example(
        "cp_partition_mode 'contiguous'", packed=SimpleNamespace(cp_partition_mode="contiguous")
    ),
    "bias of a call": example("an attention bias", attention_bias=torch.zeros(1)),
    "mask type of a call": example("the attention mask type padding", mask_type="padding"),
    "padding of a call": example("the attention mask type no_mask", mask_type="no_mask", pads=True),
    "mask of a call": example("shape (1, 8)", attention_mask=torch.zeros(1, 8)),
    "cache of a call": example("1 queries and 8 keys", query=Q[:1]),
    "capture of a call": example("being captured in a CUDA graph", capturing=True),
}


class _Config(SimpleNamespace):
    """A configuration of Bridge in which nothing is refused; arguments are set by their path."""

    def __init__(self, **values: Any) -> None:
        super().__init__(
            model=sys.modules["megatron.bridge.models.gpt_provider"].GPTModelProvider(),
            dataset=sys.modules["megatron.bridge.training.config"].GPTDatasetConfig(),
            peft=None,
            dist=SimpleNamespace(),
            inprocess_restart=SimpleNamespace(),
        )
        vars(self.model).update(context_parallel_size=2, seq_length=64)
        for path, value in values.items():
            *owners, name = path.split(".")
            owner = self
            for part in owners:
                vars(owner).setdefault(part, SimpleNamespace())
                owner = getattr(owner, part)
            setattr(owner, name, value)


CONFIGS: dict[str, tuple[str, Any]] = {
    "config.model": ("(object)", object()),
    "config.model.provide": ("(Own)", None),
    "config.model.use_transformer_engine_full_layer_spec": ("= True", True),
    "config.model.restore_modelopt_state": ("= True", True),
    "config.dataset": ("(object)", object()),
    "config.dataset.inter_document_masking": ("= True", True),
    "config.dataset.offline_packing_specs.packed_sequence_size": ("= 66", 66),
    "config.dataset.dataset_kwargs": ("(dict)", {"pad_seq_length_to_mult": 6}),
    "config.peft": ("(object)", object()),
    "config.inprocess_restart.enabled": ("= True", True),
    "config.dist.use_decentralized_pg": ("= True", True),
    "config.dist.lazy_mpu_init": ("= True", True),
    "config.model.seq_length": ("= 66", 66),
    "config.model.mtp_num_layers": ("= 1", 1),
    "config.model.fp8": ("= 'hybrid'", "hybrid"),
    "config.model.tp_comm_overlap": ("= True", True),
    "config.dist.use_megatron_fsdp": ("= True", True),
}


@pytest.fixture
def bridge_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs of Bridge's classes."""
    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    models = ModuleType("megatron.bridge.models.gpt_provider")
    models.GPTModelProvider = type("GPTModelProvider", (), {"provide": lambda self: None})
    config = ModuleType("megatron.bridge.training.config")
    for name in ("GPTDatasetConfig", "GPTSFTDatasetConfig"):
        setattr(config, name, type(name, (), {}))
    for module in (models, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def training() -> tuple[Rule, ...]:
    return (*table.TRAINING, table.ON_CPU, *table.LINEAR)


def run_of(given: Example) -> Any:
    from cp_plugin.megatron.rules.run import Run

    args = argparse.Namespace(**{**BASE, **given.args})
    return Run(
        args=args, settings=given.settings, version=given.version, device=given.device and torch.device(given.device)
    )


def with_linear(given: Example, pattern: str = "LL") -> Example:
    settings = Settings(linear=Linear(variant="gla", pattern=pattern, options=Options(layout="contiguous")))
    return replace(given, settings=settings)


def layer_of(given: Example) -> Any:
    from cp_plugin.megatron.rules.layers import Layer

    config = SimpleNamespace(**{**BASE, **given.args.get("args", {})})
    return Layer(args=config, settings=RING, **{name: v for name, v in given.args.items() if name != "args"})


def call_of(given: Example) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from cp_plugin.megatron.rules.layers import Call

    plain = {"query": Q, "key": Q, "attention_mask": None, "mask_type": "causal", "attention_bias": None}
    values = {**plain, "packed": None, **given.args}
    return Call(**values | {"mask_type": AttnMaskType[values["mask_type"]]})


def example_of(rule: Rule) -> Example:
    """The example of a rule of training."""
    if rule.name not in FLAGS:
        given = RUNS[rule.name]
    else:
        value, flag = FLAGS[rule.name], rule.name.removeprefix("linear ")
        given = example(flag if value is True else f"{flag} {value}", **{attribute(rule.name): value})
    pattern = "LLL" if rule.name == "linear layers" else "LL"
    return with_linear(given, pattern) if rule.name.startswith("linear ") else given


def test_every_rule_refuses_its_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "delta_net_takes_exchange", lambda: False)  # a difference between versions
    monkeypatch.delitem(fields.KNOWN, "add_qkv_bias")
    for rule in training():
        given = example_of(rule)
        for one in (given, *ALSO.get(rule.name, ())):
            check(rule, rule.of(run_of(one)), one.names)
    for rule in (rule for rule in (*layers.LAYER, *layers.LINEAR_LAYER) if rule is not fields.UNKNOWN):
        value = {attribute(rule.name): FLAGS.get(rule.name)}
        given = example(rule.name, args=value) if rule.name in FLAGS else LAYERS[rule.name]
        check(rule, rule.of(layer_of(given)), given.names)
    for rule in layers.CALL:
        check(rule, rule.of(call_of(CALLS[rule.name])), CALLS[rule.name].names)


def test_every_field_that_megatron_reads_is_known() -> None:
    """A field of a new version belongs in the table, once it is clear what the plugin does with it."""
    import megatron.core
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    found = fields.read(Path(megatron.core.__path__[0])) & set(MLATransformerConfig.__dataclass_fields__)
    assert {"window_size", "qk_head_dim", "mamba_head_dim", "linear_conv_kernel_dim", "deterministic_mode"} <= found
    assert found <= fields.KNOWN.keys() | {attribute(rule.name) for rule in table.TRAINING}


@pytest.mark.parametrize(
    ("reads", "given", "refused"),
    [
        ("self.config.attn_cap", {"attn_cap": 0.5}, "--attn-cap 0.5: Megatron's own attention"),
        ('getattr(config, "attn_cap", None)', {"attn_cap": 0.5}, "leave it out"),
        ("self.config.attn_cap + config.derived", {}, None),
        ("self.config.attn_cap + config.derived", {"derived": 3}, "--derived 3"),
        ("self.attn_cap", {"attn_cap": 0.5}, None),
    ],
)
def test_a_new_field_of_a_copy_is_refused(
    reads: str, given: dict[str, Any], refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its attention reads it, and it has neither its default nor what the configuration derives itself."""
    import megatron.core
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclass
    class New(TransformerConfig):
        attn_cap: float | None = None
        derived: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.derived = self.derived or self.hidden_size

    copied = shutil.copytree(megatron.core.__path__[0], tmp_path / "core", ignore=_but_attention)
    file = copied / "transformer/dot_product_attention.py"
    line = "        self.config: TransformerConfig = config\n"
    file.write_text(file.read_text().replace(line, f"{line}        cap = {reads}\n", 1))
    place = SimpleNamespace(submodule_search_locations=[str(copied)])
    monkeypatch.setattr(fields, "find_spec", lambda name: place)
    config = New(num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0, **given)
    said = [text for rule in layers.LAYER if (text := rule.of(layers.Layer(args=config, settings=RING)))]
    assert refused in said[0] if refused else not said


def _but_attention(folder: str, names: list[str]) -> list[str]:
    return [] if Path(folder).name in ("ssm", "transformer") else [n for n in names if n not in ("ssm", "transformer")]


def test_rules_of_bridges_configuration(bridge_stub: None) -> None:
    for rule in (nemo.MODEL, *nemo.RULES, *nemo.ON_CPU):
        names, value = CONFIGS[rule.name]
        config = _Config(**({rule.name.removeprefix("config."): value} if value is not None else {}))
        if rule.name == "config.model.provide":
            config.model.__class__ = type("Own", (type(config.model),), {"provide": lambda self: 1})
        check(rule, rule.of(config), f"{rule.name} {names}")
        assert nemo.refused_by(config) == [rule.name], "and no other rule"


def test_no_rule_applies_to_a_plain_run(bridge_stub: None) -> None:
    plain = example("")
    assert [rule.name for rule in training() if not rule.name.startswith("linear ") and rule.of(run_of(plain))] == []
    assert [rule.name for rule in training() if rule.of(run_of(with_linear(plain)))] == []
    assert [rule.name for rule in (*layers.LAYER, *layers.LINEAR_LAYER) if rule.of(layer_of(plain))] == []
    assert [rule.name for rule in layers.CALL if rule.of(call_of(plain))] == []
    assert nemo.refused_by(_Config()) == []


def test_a_pack_may_name_the_layout_of_the_provider() -> None:
    packed = SimpleNamespace(cp_partition_mode="striped", local_cp_size=None)
    assert [rule.name for rule in layers.CALL if rule.of(call_of(example("", query=Q[:, 0], packed=packed)))] == [
        "partition of a pack"
    ]
    given = call_of(example("", query=Q[:, 0], packed=packed, layout="striped"))
    assert [rule.name for rule in layers.CALL if rule.of(given)] == []


def test_every_rule_has_a_unique_name_and_an_example() -> None:
    rules = [*(rule for group in table.RULES.values() for rule in group), nemo.MODEL, *nemo.RULES, *nemo.ON_CPU]
    names = [rule.name for number, rule in enumerate(rules) if rule not in rules[:number]]
    examples = [*FLAGS, *RUNS, *LAYERS, *CALLS, *CONFIGS, *MODELS]
    assert sorted(names) == sorted(examples)


def test_refused_flags_exist_in_megatron() -> None:
    """A misspelt flag would never be refused. Flags that this version lacks belong to other versions or configs."""
    from megatron.training.arguments import add_megatron_arguments

    known = {a.dest for a in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions}
    elsewhere = {
        "dataloader_inter_document_masking",  # since 0.19
        "logits_save_dir",
        "logits_load_dir",
        "fp8_dot_product_attention",  # model configurations only
        "fp8_multi_head_attention",
        *("cp_partition_mode", "dynamic_context_parallel", "sequence_packing_scheduler"),  # the dev branch
        "pad_packed_seq_alignment",
    }
    assert {attribute(flag) for flag in FLAGS} - known <= elsewhere


def test_all_refusals_in_one_message_in_table_order() -> None:
    from cp_plugin.megatron.rules import checks

    wrong = {"seq_length": 62, "qk_clip": True, "reset_position_ids": True, "spec": ["local"]}
    with pytest.raises(ValueError) as raised:
        checks.before(argparse.Namespace(**{**BASE, **wrong}), RING)
    parts = str(raised.value).split(" | ")
    assert [part.split(":")[0] for part in parts] == [
        "--cp-provider ring does not support --reset-position-ids",
        "--qk-clip",
        "--spec local",
        "--seq-length 62 cannot be split evenly across --context-parallel-size 4 in the contiguous layout",
    ]
    assert parts[1].endswith("leave it out (or use --cp-provider upstream)")


def test_examples_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Append both code blocks of docs/rules.md to the table."""
    from cp_plugin.megatron.rules import checks

    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rules.md").read_text(), re.DOTALL):
        exec(block, found)
    monkeypatch.setattr(table, "TRAINING", (*table.TRAINING, found["FLAG"], found["COMBINATION"]))
    plain = BASE | {"rank": 0, "softmax_type": "vanilla", "recompute_granularity": "full"}
    checks.before(argparse.Namespace(**plain), RING)
    with pytest.raises(ValueError) as raised:
        checks.before(
            argparse.Namespace(**plain | {"moe_shared_expert_overlap": True, "softmax_type": "learnable"}), RING
        )
    assert str(raised.value) == (
        "--cp-provider ring does not support --moe-shared-expert-overlap: its stream would wait for the provider's; "
        "leave it out | --softmax-type learnable with --recompute-granularity full: the offset would be drawn twice; "
        "leave --recompute-granularity out (or use --cp-provider upstream)"
    )
