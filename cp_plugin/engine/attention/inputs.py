"""Checks of the arguments of the public calls."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_plugin.engine.comm import Mesh, device_of, network_between
from cp_plugin.engine.comm.every_rank import gather_hosts
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem, Transport
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.methods.protocol import Provider
from cp_plugin.engine.placement.documents import DOCUMENTS

type Group = dist.ProcessGroup | DeviceMesh


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""The group, where it is left out."""


def process_group(group: Any) -> dist.ProcessGroup | None:
    """The process group of a group or ``DeviceMesh`` with one dimension; None: this rank alone. ValueError for a mesh
    with several dimensions, a group without this rank, another type, or no group where torch.distributed has several
    ranks."""
    if group is UNSET:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"group is missing, and torch.distributed has {dist.get_world_size()} ranks: give group=, such as "
                "torch.distributed.group.WORLD, or group=None for attention on this rank alone"
            )
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            example = f", such as mesh[{names[-1]!r}]" if names else ""
            raise ValueError(
                f"group is a DeviceMesh with {group.ndim} dimensions{f' {names}' if names else ''}: give the one for "
                f"context parallelism{example}"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not contain this rank: only its members may shard sequences over it")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is a {type(group).__name__}: give a ProcessGroup, a DeviceMesh or None")
    return group


def check_numbers(scale: Any, window: Any = None, softcap: Any = None) -> None:
    """ValueError for a scale that is no finite number, a window that is no pair of whole numbers, or a cap that is no
    positive number."""
    for name, number, fix in (
        ("scale", scale, "give a finite number, or None for head size ** -0.5"),
        ("softcap", softcap, "give a positive number, or None for scores without a cap"),
    ):
        finite = isinstance(number, numbers.Real | torch.SymFloat) and math.isfinite(number)
        if number is not None and not (finite and (name == "scale" or number > 0)):
            raise ValueError(f"{name}={number!r}: {fix}")
    if window is not None and not (
        isinstance(window, tuple) and len(window) == 2 and all(isinstance(n, int | torch.SymInt) for n in window)
    ):
        raise ValueError(
            f"window={window!r}: give the tokens before and after, such as (1023, 0), or -1 for all of them"
        )


def mask_of(problem: Problem, documents: tuple[int, ...], tree: Tree | None) -> Mask:
    """The mask of a call; ValueError for a tree of another length, or combined with another mask."""
    if tree is None:
        return problem.mask(documents)
    if documents:
        raise ValueError("tree cannot be combined with cu_seqlens: documents are nodes of a tree without a parent")
    if not problem.causal:
        raise ValueError("tree needs causal=True: a token sees only itself and what precedes it on its path")
    if problem.window is not None:
        raise ValueError(
            "tree cannot be combined with a window: tokens far apart in the pack may be neighbours on a path; pack "
            "whole sequences as documents instead, with cu_seqlens"
        )
    if tree.seq_length != problem.seq_length:
        raise ValueError(f"the tree has {tree.seq_length} tokens, but all ranks together have {problem.seq_length}")
    return tree.mask


def typical_call(
    provider: Provider, options: Options, group: dist.ProcessGroup | None, mesh: Mesh | None, problem: Problem | None
) -> Problem:
    """The call by which the provider chooses, completed with what is known of the ranks; ValueError if it is for
    another number of ranks, or missing where the provider must know the heads."""
    size = mesh.size if mesh is not None else group.size() if group is not None else 1
    network = network_between("cuda" if group is None else device_of(group))
    typical = problem or Problem(size=size, transport=Transport(network=network))
    if typical.size != size:
        raise ValueError(f"problem is for {typical.size} context-parallel ranks, but there are {size}")
    if size > 1 and mesh is None and problem is None and provider.asks_heads(options):
        raise ValueError(
            f"{spelled('provider', provider.name)} divides the ranks by the heads: give problem=Problem(size={size}, "
            "heads=..., kv_heads=...), or head_parallel"
        )
    asks_hosts = provider.asks_hosts(options) or options.layout == DOCUMENTS.name
    if asks_hosts and group is not None and not typical.transport.hosts:
        typical = typical.with_transport(hosts=gather_hosts(group))
    return typical
