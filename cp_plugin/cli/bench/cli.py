"""The ``cp-plugin bench`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from cp_plugin.cli import flags, output
from cp_plugin.cli.terminal import new_console

Contestants = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="NAME",
        help="a method, or another library's: torch-ring, te-p2p, te-all_gather, te-a2a, te-a2a+p2p; with options as "
        "in attention2d:grid=4x2; repeatable; default: all for softmax attention",
    ),
]
Masks = Annotated[
    list[str] | None,
    typer.Option(
        "--mask",
        metavar="NAME",
        help="full, causal, full-window, causal-window, full-document or causal-document; repeatable; default: all",
    ),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--seq-length", min=1, help="tokens of one sequence; repeatable; default: 8192 per rank, 256 on the CPU"
    ),
]
Distribution = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="distribution of document lengths: pile, prolong64k or prolong512k; default: chosen by sequence length",
    ),
]


def bench(
    provider: Contestants = None,
    mask: Masks = None,
    seq_length: Lengths = None,
    ranks: flags.ForkedRanks = None,
    device: flags.Devices = flags.Device.auto,
    dtype: Annotated[
        flags.Dtype | None, typer.Option(help="element type of q, k and v; default: bfloat16, float32 on the CPU")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="query heads of the model per tensor-parallel rank; default: 64, 8 on the CPU"),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="key/value heads per tensor-parallel rank; default: 8, 4 on the CPU")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="size of a head; default: 128, 64 on the CPU")] = None,
    v_head_dim: flags.ValueDim = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences per batch")] = 1,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="sliding window in tokens; default: 1024, at most an eighth of the sequence"),
    ] = None,
    distribution: Distribution = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed for the document lengths")] = 0,
    decay: Annotated[flags.Decays, typer.Option(help="granularity of linear attention's decay")] = (flags.Decays.none),
    rounds: Annotated[int, typer.Option(min=1, help="timed calls per provider")] = 5,
    timeout: flags.Timeout = 3600,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="also predict the times for this cluster, packaged or a .toml file"),
    ] = None,
    as_json: output.AsJson = None,
) -> None:
    """Time providers, and the context parallelism of other libraries, on real ranks; each is checked first.

    Starts ranks on this machine. To bench several machines, start it with torchrun on each of them:

    torchrun --nproc-per-node 8 --no-python cp-plugin bench
    """
    from cp_plugin.cli.bench import request, run
    from cp_plugin.cli.bench.measure import Processors
    from cp_plugin.cli.bench.report import Report
    from cp_plugin.planner.machine import hardware
    from cp_plugin.testing import ranks as started

    with flags.errors_in_one_line():
        where, size = flags.device_name(device), started.number_of_ranks(ranks)
        problem = request.typical(
            where, size=size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim or 0,
            batch=batch, dtype=dtype and flags.torch_dtype(dtype), decay=decay.value,
        )  # fmt: skip
        profile = None if cluster is None else hardware.cluster(cluster)
        entries, left_out = request.contestants(provider or (), where)
        problems = request.each_length(problem, seq_length or (), where)
        how = {"window": window, "distribution": distribution, "seed": seed}
        cases = request.make_cases(problems, entries[0].kind, mask or (), **how)
        here = started.start(where, size)
        cases = [case.on(started.hosts(size)) for case in cases]
        request.check_size(cases, where)
        plans = [run.plan(case, entries, where, profile) for case in cases]
        processors = Processors()
        found = Report(
            results=run.bench(plans, where, rounds, timeout, here),
            device=request.in_words(where),
            rounds=rounds,
            seed=seed,
            cluster=cluster,
            left_out=left_out,
            others=processors.others() if here is None and where == "cpu" else 0.0,
        )
    if started.is_first():
        output.show(as_json, found.as_json, lambda: found.print(new_console()))
        output.verdict(found.ok, found.verdict, as_json)
    elif not found.ok:
        raise typer.Exit(1)
