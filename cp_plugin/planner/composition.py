"""What a method is composed of, whatever its name and those of its axes: candidates that are alike are priced once."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from cp_plugin.attention.setups import Setup
from cp_plugin.comm import Mesh, TraceMesh, sums


class _Kernel:
    """What a method is built around, here."""


def composition(setup: Setup) -> tuple[object, ...]:
    """Equal for setups that make the same moves on the same axes, with the same tokens on every rank."""
    provider, problem = setup.provider, setup.problem
    if provider.kind != "softmax":
        return provider.name, setup.layout, setup.options
    axes = provider.axes(problem.size, setup.options)
    method = provider.build(TraceMesh(axes, 0), _Kernel(), problem, setup.options)
    beside = tuple(n for name, n in axes.items() if name in provider.beside)
    apart = tuple(n for name, n in axes.items() if sums(name) in provider.extra_groups and n > 1)
    sizes = tuple(n for n in axes.values() if n > 1)
    return setup.layout, sizes, beside, apart, _parts(method, axes), setup.options.fp8, problem


def _parts(part: object, axes: dict[str, int]) -> object:
    if isinstance(part, Mesh):
        return type(part).__name__
    if isinstance(part, _Kernel):
        return "kernel"
    if isinstance(part, str):
        return axes.get(part, part)
    if isinstance(part, tuple):
        return tuple(_parts(one, axes) for one in part)
    if is_dataclass(part):
        return type(part).__name__, *(_parts(getattr(part, f.name), axes) for f in fields(part))
    return part
