"""``apply``: puts the plugin's attention into a Bridge config."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.common.versions import is_in_range

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_UPSTREAM = "upstream"


def activate(device: str = "auto") -> None:
    """Switch on CPU mode where there is no CUDA device; call it before anything imports Bridge.

    Not needed on CUDA.

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
    check_every: int | None = None,
    allow_untested_bridge: bool = False,
    **options: Any,
) -> ConfigContainer:
    """Make a Bridge training use a context-parallel provider; changes ``config`` and returns it.

    Call it on every rank once the config is complete, and pass the config to Bridge's ``pretrain`` with Bridge's
    ``forward_step``. The config is checked again when the training starts; audit and self-check run on the built model.

    Args:
        config: of a GPT model, with ``config.model.context_parallel_size`` of 2 or more.
        provider: a name as for ``--cp-provider``. ``upstream`` leaves attention to Bridge. With ``auto`` the planner
            chooses a provider and its options for this model and these parallel sizes.
        cluster: what ``auto`` plans for, as for ``--cp-cluster``; None: these devices.
        linear_attention: the variant of linear attention, as for ``--cp-linear-attention``.
        layer_pattern: linear (L) and softmax (N) layers, repeated over the layers; None: all linear.
        linear_provider: context parallelism of the linear layers; None: ``lasp2``.
        recompute_attention: with recomputation, repeat attention in the backward pass instead of keeping its output.
        selfcheck: ``once`` or ``off``.
        check_every: check one call of attention every so many iterations, as ``--cp-check-every``; 0: never; None: its
            default.
        allow_untested_bridge: accept a Megatron-Bridge outside ``TESTED_RANGE``.
        options: layout, backend, and provider options such as grid, named like the flags ``--cp-layout`` and so on;
            None leaves the choice to the provider. A grid is ``"4x2"`` or ``(4, 2)``.

    Raises:
        ValueError: for what is not supported, naming the field of the config or the argument, its value, and the fix.
    """
    from cp_plugin.engine.methods import registry as providers
    from cp_plugin.megatron.cpu import mode as cpu

    known = providers.registry().options
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"apply() got unknown options {', '.join(unknown)}: there are {', '.join(sorted(known))}")
    texts = {key: show_option(tuple(x) if isinstance(x, list) else x) for key, x in options.items() if x is not None}
    ours = {f"cp_{name}": texts.get(name) for name in options}
    ours |= {"cp_cluster": cluster, "cp_layer_pattern": layer_pattern, "cp_linear_provider": linear_provider}
    ours["cp_linear_attention"] = linear_attention
    nothing = provider == _UPSTREAM and selfcheck == "once" and not recompute_attention and not check_every
    if nothing and all(value is None for value in ours.values()) and not cpu.active():
        return config
    check_release(bridge_version(), allow_untested=allow_untested_bridge)
    if not cpu.active() and cpu.decide("auto"):
        raise ValueError(
            "torch finds no CUDA device, but Bridge was imported for one: call cp_plugin.nemo.activate() before "
            "anything imports megatron.bridge"
        )
    from cp_plugin.nemo import hooks

    switches: dict[str, Any] = {"cp_recompute_attention": recompute_attention, "cp_selfcheck": selfcheck}
    if check_every is not None:
        switches["cp_check_every"] = str(check_every)
    if nothing:
        switches["cp_selfcheck"] = None
    softmax = None if linear_attention is not None and provider == _UPSTREAM else provider
    hooks.prepare(config, {"cp_provider": softmax, **ours, **switches})
    return config


TESTED_RANGE = ">=0.6.2,<0.6.3"


def bridge_version() -> str:
    """The installed release; ValueError if there is none."""
    try:
        return version("megatron-bridge")
    except PackageNotFoundError:
        raise ValueError(
            "cp_plugin.nemo needs megatron-bridge, which is not installed: pip install 'cp-plugin[nemo]'"
        ) from None


def check_release(release: str, *, allow_untested: bool) -> None:
    """ValueError for an untested release, unless the user allows it."""
    if not allow_untested and not is_in_range(release, TESTED_RANGE):
        raise ValueError(
            f"megatron-bridge {release} was not tested with cp_plugin; megatron-bridge{TESTED_RANGE} was: install a "
            "release in that range, or pass allow_untested_bridge=True to apply."
        )
