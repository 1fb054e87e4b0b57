"""One more option for a provider, which changes what travels and of which its method need not know.

The method is built on a mesh that sends it so, and its formula counts the bytes as they travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cp_plugin.comm import Mesh
from cp_plugin.core.options import Option, Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods.protocol import Choice, Formula, Provider


def with_option(
    inner: Provider,
    option: Option,
    *,
    as_sent: Callable[[Problem, Options], Problem],
    over: Callable[[Mesh, Problem], Mesh],
    refused: Callable[[Problem, Options], str | None],
) -> Provider:
    """The provider with the option.

    Args:
        option: its declaration.
        as_sent: the problem with what the option makes of it, which is all that the provider sees of it.
        over: the mesh on which such a problem's method is built.
        refused: why the option does not fit a problem, or None.
    """

    def build(mesh: Mesh, local: Any, problem: Problem, options: Options) -> Any:
        problem = as_sent(problem, options)
        return inner.build(over(mesh, problem), local, problem, options)

    def traffic(problem: Problem, options: Options, index: int) -> Formula:
        return inner.traffic(as_sent(problem, options), options, index)

    def choose(problem: Problem, options: Options) -> Choice:
        return inner.choose(as_sent(problem, options), options)

    def unsupported(problem: Problem, options: Options) -> str | None:
        return refused(problem, options) or inner.unsupported(as_sent(problem, options), options)

    return replace(
        inner,
        options=(*inner.options, option),
        build=build,
        traffic=traffic,
        choose=choose,
        unsupported=unsupported,
    )
