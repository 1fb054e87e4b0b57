"""The ``cp-plugin calibrate`` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.tools import flags, output
from cp_plugin.tools.output import new_console

if TYPE_CHECKING:
    from cp_plugin.planner.machine.hardware import Cluster


def calibrate(
    file: Annotated[Path, typer.Argument(help="profile to write, a .toml file")],
    ranks: flags.ForkedRanks = None,
    device: flags.Devices = flags.Device.auto,
    dtype: Annotated[
        list[flags.Dtype] | None,
        typer.Option(help="repeatable; default: bfloat16 and float16; float32 and bfloat16 on the CPU"),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="size of a head; default: 128, 64 on the CPU")] = None,
    timeout: flags.Timeout = 1800,
) -> None:
    """Measure the kernels and links of the machines that the ranks run on, and write a profile for the planner.

    Starts ranks on this machine. To measure several machines, start it with torchrun on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --no-python cp-plugin calibrate mine.toml
    """
    import torch
    import torch.distributed as dist

    from cp_plugin.planner.calibration.link_rates import calibrate as measure
    from cp_plugin.planner.machine import hardware
    from cp_plugin.testing import ranks as started

    with flags.errors_in_one_line():
        if started.is_first():
            output.check_output(file, "profile", (".toml",))
        where, count = flags.device_name(device), started.number_of_ranks(ranks)
        if count < 2:
            shown = f"--ranks {ranks}" if ranks is not None else "one rank under torchrun"
            raise ValueError(f"{shown}: a single rank has no links to measure; use two or more")
        own_device = started.start(where, count)
        dtypes = [flags.torch_dtype(d) for d in dtype or ()]

        def rank(torch_device: torch.device) -> Cluster:
            console = new_console(stderr=True, quiet=dist.get_rank() != 0)
            with console.status("calibrating") as status:
                return measure(file.stem, torch_device, dtypes, head_dim, shown=status.update)

        cluster = started.run(rank, count, where, timeout, own_device)
        if started.is_first():
            hardware.save(cluster, file)
            _show(cluster, file)


def _show(cluster: Cluster, file: Path) -> None:
    kernels = (
        f"{dtype} {k.forward.flops_per_s / 1e12:.3g} forward, {k.backward.flops_per_s / 1e12:.3g} backward"
        for dtype, k in cluster.device.attention.items()
    )
    links = [("inside a node", cluster.intra)] * (cluster.per_node > 1) + [("of a network card", cluster.inter)]
    typer.echo(f"{cluster.device.name}: attention, TFLOP/s: {'; '.join(kernels)}")
    for where, link in links:
        typer.echo(f"{where}: {link.bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us")
    typer.echo(f"{cluster.per_node} ranks and {cluster.nics} network cards per node")
    typer.echo(f"wrote {file}: use it as --cluster {file}")
