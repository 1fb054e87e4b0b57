"""The ``cp-plugin verify`` command."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from cp_plugin.engine.comm import network_between
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem, Transport
from cp_plugin.testing import verify as training
from cp_plugin.testing import verify_decode as generation
from cp_plugin.tools import flags, output
from cp_plugin.tools.output import new_console
from cp_plugin.tools.tables import print_verified, verified_as_json

_NONE = "has no effect with --decode"


@flags.provider_options()
def verify(
    provider: flags.Providers = None,
    ranks: Annotated[int, typer.Option(min=1, help="ranks to start on this machine")] = 4,
    device: flags.Devices = flags.Device.auto,
    dtype: Annotated[
        list[flags.Dtype] | None,
        typer.Option(help="repeatable; default: float32 and bfloat16; bfloat16 with --fp8 or --gradient-dtype model"),
    ] = None,
    heads: flags.Heads = 8,
    kv_heads: Annotated[
        int | None,
        typer.Option(min=1, help="key/value heads per tensor-parallel rank; default: --heads, then a quarter of that"),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="size of a head")] = 32,
    v_head_dim: flags.ValueDim = None,
    seq_length: Annotated[int | None, typer.Option(help="tokens of one sequence; default: 32 per rank")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences per batch")] = 2,
    mask: Annotated[flags.Mask | None, typer.Option(help="attention mask; default: both")] = None,
    *,
    options: Options,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="verify generation instead: a prompt, then token by token; with --fp8 comm, the cache is in FP8, too",
        ),
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Run providers on this machine's devices, forward and backward, and compare with attention on one device."""
    with flags.errors_in_one_line():
        where = flags.device_name(device)
        if decode:
            flags.refuse(
                {"--mask": mask if mask is flags.Mask.full else None}, f"{_NONE}, where later tokens do not exist yet"
            )
            backward = {"--backward": options.backward, "--gradient-dtype": options.gradient_dtype}
            flags.refuse(backward, f"{_NONE}, which computes no gradients")
            if options.fp8 == "compute":
                raise ValueError(
                    f"--fp8 compute {_NONE}, which computes in float32: use --fp8 comm, which sends and caches in FP8"
                )
        half = options.fp8 is not None or options.gradient_dtype == "model"
        dtypes = dtype or [flags.Dtype.float32, flags.Dtype.bfloat16][half:]
        masks = [flags.Mask.causal] if decode else list(flags.Mask) if mask is None else [mask]
        fewer = heads // 4 if heads % 4 == 0 else 1
        problems = [
            Problem(
                size=ranks,
                heads=heads,
                kv_heads=g,
                head_dim=head_dim,
                v_head_dim=v_head_dim or 0,
                seq_length=32 * ranks if seq_length is None else seq_length,
                batch=batch,
                dtype=flags.torch_dtype(name),
                causal=sees is flags.Mask.causal,
                transport=Transport(network=network_between(where)),
            )
            for name, sees, g in itertools.product(dtypes, masks, [heads, fewer] if kv_heads is None else [kv_heads])
        ]
        planned = (generation if decode else training).plan(provider or (), problems, options)
        results = training.verify(planned, where, check=generation.GENERATION if decode else None)
    title = (
        f"{ranks} rank{'s' * (ranks > 1)} on {where}{', prefill and decode' * decode}, against attention on one device"
    )
    output.show(
        as_json,
        lambda: verified_as_json(planned, results),
        lambda: print_verified(new_console(), title, planned, results),
    )
    good = sum(result.ok for result in results)
    refused = len(planned) - len(results)
    text = f"{good} of {len(results)} within limits" + (
        f"; {refused} cannot run, for the reasons given" * bool(refused)
    )
    output.verdict(good == len(results) > 0, text, as_json)
