"""The table of rules: every rule refuses its example, in a message that names flag, value and fix."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rule_examples import CONFIGS, PLAIN, RING, SUBJECTS, Q, attribute, call, check, check_run, run_of, run_that

from cp_plugin.megatron import compat
from cp_plugin.megatron.rules import checks, fields, layers
from cp_plugin.megatron.rules.rule import Rule
from cp_plugin.nemo import refusals as nemo

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("adapter")


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
    return (*checks.TRAINING, checks.ON_CPU, *checks.LINEAR)


def test_every_rule_refuses_its_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "delta_net_takes_exchange", lambda: False)  # a difference between versions
    monkeypatch.delitem(fields.KNOWN, "add_qkv_bias")
    assert all(rule.examples for rule in training())
    for rule, line in [(one, line) for one in training() for line in one.examples]:
        check_run(rule, line)
    for group, (make, examples) in SUBJECTS.items():
        for rule in checks.RULES[group]:
            if rule.name in examples:
                names, fields_set = examples[rule.name]
                check(rule, rule.message(make(**fields_set)), names)
            elif rule is not fields.UNKNOWN:  # the flag's own rule, which reads a layer's configuration, too
                name = attribute(rule.name)
                check(rule, rule.message(make({name: getattr(run_of(rule.example).args, name)})), rule.name)


def test_a_machine_that_is_planned_for_may_be_a_gpu() -> None:
    (rule,) = (rule for rule in training() if rule.name == "determinism on CUDA")
    run = run_of("--deterministic-mode")
    assert rule.message(replace(run, device=None)) and not rule.message(run)


def test_no_rule_crashes_on_a_number_that_makes_no_sense() -> None:
    """Each number of each example as 0 and -1, or none: the rule answers, or is named as one that cannot."""
    refused = []
    for rule, line in [(one, line) for one in training() for line in one.examples]:
        run = run_that(rule, line)
        flags = {attribute(word) for word in f"{PLAIN} {line}".split() if word.startswith("--")}
        numbers = {name for name in flags if type(getattr(run.args, name, None)) in (int, float)}
        for name, odd in product(sorted(numbers), (0, -1, None)):
            try:
                rule.message(replace(run, args=argparse.Namespace(**vars(run.args) | {name: odd})))
            except ValueError as said:
                refused.append(str(said).partition(f" ({rule.name}): ")[0])
    assert set(refused) == {"the flags cannot be checked"}


def test_every_field_that_megatron_reads_is_known() -> None:
    """A field of a new version belongs in the table, once it is clear what the plugin does with it."""
    import megatron.core
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    names = fields.read(Path(megatron.core.__path__[0])) & set(MLATransformerConfig.__dataclass_fields__)
    assert {"window_size", "qk_head_dim", "mamba_head_dim", "linear_conv_kernel_dim", "deterministic_mode"} <= names
    assert names <= fields.KNOWN.keys() | {attribute(rule.name) for rule in checks.TRAINING}


@pytest.mark.parametrize(
    ("reads", "values", "refused"),
    [
        ("self.config.attn_cap", {"attn_cap": 0.5}, "--attn-cap 0.5: Megatron's own attention"),
        ('getattr(config, "attn_cap", None)', {"attn_cap": 0.5}, "leave it out"),
        ("self.config.attn_cap + config.derived", {}, None),
        ("self.config.attn_cap + config.derived", {"derived": 3}, "--derived 3"),
        ("self.attn_cap", {"attn_cap": 0.5}, None),
    ],
)
def test_a_new_field_of_attention_is_refused(
    reads: str, values: dict[str, Any], refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its attention reads it, and it has neither its default nor what the configuration derives itself."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclass
    class New(TransformerConfig):
        attn_cap: float | None = None
        derived: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.derived = self.derived or self.hidden_size

    (tmp_path / "transformer").mkdir()
    attention = f"class DotProductAttention:\n    def __init__(self, config):\n        cap = {reads}\n"
    (tmp_path / "transformer/dot_product_attention.py").write_text(attention)
    place = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(fields, "find_spec", lambda name: place)
    config = New(num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0, **values)
    said = [text for rule in layers.LAYER if (text := rule.message(layers.Layer(args=config, settings=RING)))]
    assert refused in said[0] if refused else not said


def test_rules_of_bridges_configuration(bridge_stub: None) -> None:
    for rule in (nemo.MODEL, *nemo.RULES, *nemo.ON_CPU):
        names, value = CONFIGS[rule.name]
        config = _Config(**({rule.name.removeprefix("config."): value} if value is not None else {}))
        if rule.name == "config.model.provide":
            config.model.__class__ = type("Own", (type(config.model),), {"provide": lambda self: 1})
        check(rule, rule.message(config), f"{rule.name} {names}")
        assert [one.name for one in nemo.rules_for(config) if one.message(config)] == [rule.name], "and no other rule"


def test_no_rule_applies_to_a_plain_run(bridge_stub: None) -> None:
    for linear in (False, True):
        rules = [rule for rule in training() if linear or not rule.name.startswith("linear ")]
        assert [rule.name for rule in rules if rule.message(run_of("", linear=linear))] == []
    for group, (make, _) in SUBJECTS.items():
        assert [rule.name for rule in checks.RULES[group] if rule.message(make())] == []
    assert [rule.name for rule in nemo.rules_for(_Config()) if rule.message(_Config())] == []


def test_a_pack_may_name_the_layout_of_the_provider() -> None:
    packed = SimpleNamespace(cp_partition_mode="striped", local_cp_size=None)
    for provided, refused in (({}, ["partition of a pack"]), ({"layout": "striped"}, [])):
        subject = call(query=Q[:, 0], packed=packed, **provided)
        assert [rule.name for rule in layers.CALL if rule.message(subject)] == refused


def test_every_rule_has_a_unique_name_and_every_example_a_rule() -> None:
    rules = {id(rule): rule for group in checks.RULES.values() for rule in group}
    names = [rule.name for rule in (*rules.values(), nemo.MODEL, *nemo.RULES, *nemo.ON_CPU)]
    examples = [*CONFIGS, *(name for _, examples in SUBJECTS.values() for name in examples)]
    assert len(names) == len({*names}) and {*examples} < {*names}


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
    flags = {attribute(rule.name) for rule in training() if rule.name.startswith(("--", "linear --"))}
    assert flags - known <= elsewhere


def test_all_refusals_in_one_message_in_table_order() -> None:
    with pytest.raises(ValueError) as raised:
        checks.check_parsed(run_of("--reset-position-ids --qk-clip --spec local --seq-length 62").args, RING)
    parts = str(raised.value).split(" | ")
    assert [part.split(":")[0] for part in parts] == [
        "--cp-provider ring does not support --reset-position-ids",
        "--qk-clip",
        "--spec local",
        "--seq-length 62 cannot be split evenly across --context-parallel-size 4 in the contiguous layout",
    ]
    assert parts[1].endswith("leave it out (or use --cp-provider upstream)")


def test_the_pages_have_every_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    messages = importlib.import_module("messages")
    rules = {rule.name for of_group in messages.RULES.values() for rule in of_group}
    assert "".join(messages.pages().values()).count("\n| `") == len(rules)


def test_examples_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Append both code blocks of docs/rules.md to the checks."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rules.md").read_text(), re.DOTALL):
        exec(block, names)
    for rule in (added := (names["FLAG"], names["COMBINATION"])):
        check_run(rule, rule.example)
    monkeypatch.setattr(checks, "TRAINING", (*checks.TRAINING, *added))
    plain = "--recompute-granularity full --calculate-per-token-loss"
    checks.check_parsed(run_of(plain).args, RING)
    with pytest.raises(ValueError) as raised:
        checks.check_parsed(run_of(f"{plain} --moe-shared-expert-overlap --softmax-type learnable").args, RING)
    assert str(raised.value) == (
        "--cp-provider ring does not support --moe-shared-expert-overlap: its stream would wait for the provider's; "
        "leave it out | --softmax-type learnable with --recompute-granularity full: the offset would be drawn twice; "
        "leave --recompute-granularity out (or use --cp-provider upstream)"
    )
