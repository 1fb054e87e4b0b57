"""``apply``: a Bridge config gets the plugin's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cp_plugin.core.text import in_words
from cp_plugin.nemo import versions

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_UPSTREAM = "upstream"


def activate(device: str = "auto") -> None:
    """Switch CPU mode on where there is no CUDA device; call it before anything imports Bridge.

    On CUDA it does nothing, and may be left out: ``apply`` does the rest.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ValueError: for another device, and for ``cuda`` where there is none.
        RuntimeError: for CPU mode when Bridge was imported before it.
    """
    from cp_plugin.megatron.cpu import mode as megatrons

    if not megatrons.active() and megatrons.decide(device):
        from cp_plugin.nemo import cpu

        cpu.activate()


def apply(
    config: ConfigContainer,
    provider: str = _UPSTREAM,
    *,
    cluster: str | None = None,
    linear_attention: str | None = None,
    layer_pattern: str | None = None,
    linear_provider: str | None = None,
    recompute_attention: bool = False,
    selfcheck: str = "once",
    check_every: int = 0,
    allow_untested_bridge: bool = False,
    **options: Any,
) -> ConfigContainer:
    """Let a training of Bridge attend with a context-parallel provider; changes ``config`` and returns it.

    Call it last, when the config is complete, on every rank, and hand the config to Bridge's ``pretrain`` with Bridge's
    own ``forward_step``. Everything is checked again when the training starts; audit and self-check run when the model
    is built.

    Args:
        config: of a GPT model, with ``config.model.context_parallel_size`` of 2 or more.
        provider: a name as for ``--cp-provider``. ``upstream`` changes nothing (in CPU mode: no attention). With
            ``auto`` the planner chooses one, and its options, for this model and these parallel sizes.
        cluster: what ``auto`` plans for, as for ``--cp-cluster``; None: these devices.
        linear_attention: the variant of linear attention that layers get, as for ``--cp-linear-attention``.
        layer_pattern: which layers (L), and which keep softmax attention (N), repeated over the layers; None: all.
        linear_provider: context parallelism of the linear layers; None: ``lasp2``.
        recompute_attention: with recomputation, repeat attention in the backward instead of keeping its output.
        selfcheck: ``once`` or ``off``.
        check_every: in every so many iterations, compute a few rows of attention again and compare; 0: never.
        allow_untested_bridge: go on with a Megatron-Bridge outside ``versions.TESTED_RANGE``.
        options: layout, backend, and those of providers, such as grid, named as the flags ``--cp-layout`` and so on;
            None leaves the choice to the provider. A grid is ``"4x2"`` or ``(4, 2)``.

    Raises:
        ValueError: for what is not supported, naming the field of the config or the argument, its value, and the fix.
    """
    _check_names(options)
    ours = {f"cp_{name}": _text(value) for name, value in options.items()}
    ours |= {"cp_cluster": cluster, "cp_layer_pattern": layer_pattern, "cp_linear_provider": linear_provider}
    ours["cp_linear_attention"] = linear_attention
    nothing = provider == _UPSTREAM and selfcheck == "once" and not recompute_attention and not check_every
    if nothing and all(value is None for value in ours.values()) and not _on_cpu():
        return config
    versions.check(versions.bridge_version(), allow_untested=allow_untested_bridge)
    _need_cpu_mode()
    from cp_plugin.nemo import hooks

    switches: dict[str, Any] = {"cp_recompute_attention": recompute_attention, "cp_selfcheck": selfcheck}
    if check_every != 0:
        switches["cp_check_every"] = str(check_every)
    if nothing:
        switches["cp_selfcheck"] = None
    softmax = None if linear_attention is not None and provider == _UPSTREAM else provider
    hooks.prepare(config, {"cp_provider": softmax, **ours, **switches})
    return config


def _check_names(options: Mapping[str, Any]) -> None:
    from cp_plugin.methods import registry as providers

    known = providers.registry().options
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"apply() got unknown options {', '.join(unknown)}: there are {', '.join(sorted(known))}")


def _on_cpu() -> bool:
    from cp_plugin.megatron.cpu import mode as cpu

    return cpu.active()


def _need_cpu_mode() -> None:
    """ValueError where there is no CUDA device and Bridge was imported without CPU mode."""
    from cp_plugin.megatron.cpu import mode as cpu

    if not cpu.active() and cpu.decide("auto"):
        raise ValueError(
            "torch finds no CUDA device, and Bridge was imported for one: call cp_plugin.nemo.activate() before "
            "anything imports megatron.bridge"
        )


def _text(value: Any) -> str | None:
    """An option as it would be written behind its flag."""
    if value is None:
        return None
    return in_words(tuple(value) if isinstance(value, list) else value)
