"""CPU mode: Megatron trains on the CPU over Gloo, with the code, flags and scripts of a GPU training.

    torch.cuda, CUDA devices, NCCL              `cuda_surface`, installed and removed as a whole
    libraries of CUDA kernels                   hidden, so that Megatron uses its torch code
    torch.compile'd helpers                     run uncompiled
    flags that default to a CUDA kernel         other defaults (FLAGS); contradicting flags are refused

Importing this module has no side effects. Call `activate` before Megatron is imported: Megatron looks for optional
libraries at import, and `activate` fails if it has found one. `deactivate` undoes everything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from cp_plugin.engine.common.names import one_of
from cp_plugin.megatron.cpu.cuda_surface import OnCpu, surface
from cp_plugin.megatron.flags.args import DEVICES
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.patching import Call, Patch, wraps
from cp_plugin.megatron.state import STATE

_HIDDEN = (
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "fused_weight_gradient_mlp_cuda",
    "mamba_ssm",
)
_EXPECTED_WARNINGS = (
    "'pin_memory' argument is set as true but no accelerator",
    r".*(Apex|transformer-engine|Transformer Engine)",  # reported missing, since CPU mode hides them
)
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron requires 1, to order communication by CUDA's queues, and something else for fully sharded parameters."""

FLAGS: Mapping[str, tuple[Any, str]] = {
    "transformer_impl": ("local", "--transformer-impl local"),
    "distributed_backend": ("gloo", "--distributed-backend gloo"),
    "use_cpu_initialization": (True, "--use-cpu-initialization"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "bias_swiglu_fusion": (False, "--no-bias-swiglu-fusion"),
    "bias_gelu_fusion": (False, "--no-bias-gelu-fusion"),
    "bias_dropout_fusion": (False, "--no-bias-dropout-fusion"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
    "gradient_reduce_div_fusion": (False, "--no-gradient-reduce-div-fusion"),
}
"""Megatron's arguments with another default in CPU mode: that, and its spelling on a command line."""


def decide(requested: str) -> bool:
    """Return True if --cp-device asks for CPU mode: "auto" without a CUDA device, "cpu" always, "cuda" never.

    Does not initialize CUDA, so that ranks can still be forked. Raises ValueError for another value, and for "cuda"
    without a CUDA device.
    """
    one_of("--cp-device", requested, DEVICES, suggest=False)
    has_cuda = _cuda_found()
    if requested == "cuda" and not has_cuda:
        raise ValueError(
            "--cp-device cuda: torch finds no CUDA device. Check the driver and CUDA_VISIBLE_DEVICES, "
            "or use --cp-device cpu (or auto) to train on the CPU"
        )
    return requested == "cpu" or not has_cuda


def _cuda_found() -> bool:
    # without NVML, CUDA would be unusable in processes that are forked later
    with patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return not active() and torch.cuda.is_available()


def active() -> bool:
    """Return True if CPU mode is on in this process."""
    return STATE.leave_cpu is not None


def activate() -> None:
    """Switch CPU mode on, print that on rank 0, and import Megatron; idempotent.

    Raises RuntimeError if Megatron has been imported together with a library that CPU mode must hide.
    """
    if active():
        return
    why = "as asked" if _cuda_found() else "no CUDA device found"
    with contextlib.ExitStack() as undo:
        _hide_libraries(undo)
        _replace_surface(undo)
        undo.enter_context(OnCpu())
        if "torch._dynamo" in sys.modules:  # also run functions uncompiled that were passed to torch.compile before
            undo.callback(patching.lend(sys.modules["torch._dynamo"].config, "disable", True))
        set_item(os.environ, _CONNECTIONS, os.environ.get(_CONNECTIONS, "1"), undo)
        undo.enter_context(warnings.catch_warnings())
        for expected in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=expected)
        undo.callback(patching.undo, "process")
        patching.install(PATCHES, "process")
        use_compiled_helper()
        STATE.leave_cpu = undo.pop_all()
    if os.environ.get("RANK", "0") == "0":
        print(f"cp_plugin: CPU mode ({why}): Megatron trains on the CPU over Gloo, without CUDA kernels", flush=True)


def deactivate() -> None:
    """Undo `activate`; idempotent."""
    if STATE.leave_cpu is not None:
        undo, STATE.leave_cpu = STATE.leave_cpu, None
        undo.close()


def set_flag_defaults(parser: argparse.ArgumentParser) -> None:
    """Set CPU mode's defaults in Megatron's parser; RuntimeError for an argument that this Megatron does not have."""
    known = {action.dest for action in parser._actions}
    missing = [dest for dest in FLAGS if dest not in known]
    if missing:
        raise RuntimeError(f"this Megatron has no argument {', '.join(missing)}, which CPU mode needs to set")
    parser.set_defaults(**{dest: value for dest, (value, _) in FLAGS.items()})


def check_flags(args: argparse.Namespace) -> None:
    """ValueError for every flag that contradicts CPU mode; print which flags have no effect there."""
    wrong = [dest for dest, (value, _) in FLAGS.items() if getattr(args, dest) != value]
    if wrong:
        spelled = ", ".join(_spelled(dest, getattr(args, dest)) for dest in wrong)
        fix = " ".join(FLAGS[dest][1] for dest in wrong)
        raise ValueError(
            f"{spelled}: not available on the CPU. Leave it out, use {fix}, or train on a GPU with --cp-device cuda"
        )
    _refuse_resumption(args)
    fully_sharded = args.use_megatron_fsdp or args.use_torch_fsdp2
    os.environ[_CONNECTIONS] = "8" if fully_sharded else "1"
    if getattr(args, "fp8", None) and args.rank == 0:
        print(
            f"cp_plugin: --fp8-format {args.fp8} has no effect on linear layers on the CPU: FP8 layers need "
            "Transformer Engine, on CUDA",
            flush=True,
        )


def _refuse_resumption(args: argparse.Namespace) -> None:
    """ValueError for a saved distributed optimizer: with torch's Adam, Megatron can neither read it nor count steps."""
    sharded = args.use_distributed_optimizer and not args.use_megatron_fsdp
    saved = args.load is not None and os.path.exists(os.path.join(args.load, "latest_checkpointed_iteration.txt"))
    if sharded and saved and not (args.no_load_optim or args.finetune):
        raise ValueError(
            f"--load {args.load} with --use-distributed-optimizer on the CPU: Megatron resumes its distributed "
            "optimizer only with the Adam of Transformer Engine or Apex, on CUDA. Add --no-load-optim, or train on a "
            "GPU; without --use-distributed-optimizer from the start, the CPU resumes too"
        )


def _spelled(dest: str, value: Any) -> str:
    option, _, wants_value = FLAGS[dest][1].partition(" ")
    return f"{option} {value}" if wants_value else f"{dest}={value}"


def set_item(mapping: MutableMapping[str, Any], name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Set an item until ``undo`` is closed."""
    if name in mapping:
        undo.callback(mapping.__setitem__, name, mapping[name])
    else:
        undo.callback(mapping.pop, name, None)
    mapping[name] = value


def _hide_libraries(undo: contextlib.ExitStack) -> None:
    """Make imports of these libraries fail, by None in sys.modules."""
    loaded = [name for name in _HIDDEN if sys.modules.get(name) is not None]
    if loaded and "megatron.core" in sys.modules:
        raise RuntimeError(
            f"CPU mode: Megatron was imported together with {', '.join(loaded)}, whose kernels need CUDA. "
            "Activate the plugin before anything imports megatron"
        )
    for name in _HIDDEN:
        set_item(sys.modules, name, None, undo)


def _replace_surface(undo: contextlib.ExitStack) -> None:
    replaced: list[tuple[Any, Any]] = []
    for path, stand_in in surface().items():
        *parents, name = path.split(".")
        owner: Any = functools.reduce(getattr, parents, torch)
        before = vars(owner).get(name)
        undo.callback(patching.lend(owner, name, stand_in))
        of_torch = type(torch.FloatTensor) in (type(before), type(stand_in))  # stand-ins of tensor types
        if before is not None and not of_torch:
            replaced.append((before, stand_in))
    _rebind(replaced)
    undo.callback(_rebind, [(new, old) for old, new in replaced])  # also in modules imported in CPU mode


def _rebind(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace old by new objects in Megatron's modules, which imported them by value."""
    new = {id(old): new for old, new in pairs}
    for module in [m for name, m in patching.importers().items() if name.partition(".")[0] == "megatron"]:
        for name, value in [(name, value) for name, value in vars(module).items() if id(value) in new]:
            setattr(module, name, new[id(value)])


@wraps(
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    "sequence parallelism with torch's norms",
    "config",
    otherwise="gradients of norms would not be summed over the tensor-parallel ranks",
)
def replace_torch_norm(call: Call) -> torch.nn.Module:
    """Mark the parameters of Megatron's torch norm, so that their gradients are summed over tensor-parallel ranks."""
    parallel, plain = call["config"].sequence_parallel, copy.copy(call["config"])
    plain.sequence_parallel = False
    norm = call.original(config=plain)
    for parameter in norm.parameters():
        parameter.sequence_parallel = parallel
    return norm


def no_warm_up(original: Callable[..., None]) -> Callable[..., None]:
    """Skip the warm-up of fused functions: it draws from the weights' generator here, by the parallel sizes."""
    return lambda *args, **kwargs: None


@wraps(
    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
    "packed documents on one rank",
    "query key value",
    otherwise="tokens would attend to other documents",
)
def replace_dot_product_attention(call: Call) -> torch.Tensor:
    """Attend to one document of a pack, q ``[t, h, d]``, k and v ``[t, g, d]``, after the other.

    Padding behind a document is treated as its end, which no token before it sees.
    """
    packed = call.arguments.get("packed_seq_params")
    if packed is None:
        return call.original()
    q, k, v = (call[name] for name in ("query", "key", "value"))
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    outs = []
    for begin, end in pairwise(sorted({*ends.tolist(), q.size(0)})):
        query, key, value = (x[begin:end].unsqueeze(1) for x in (q, k, v))
        outs.append(call.original(query=query, key=key, value=value, packed_seq_params=None).squeeze(1))
    return torch.cat(outs)


def accept_channels(original: Callable[..., None]) -> Callable[..., None]:
    """Let ``DotProductAttention`` have values of another size than keys, as multi-latent attention has."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kw: Any) -> None:
        if v_channels is not None:
            config = copy.copy(config)
            config.kv_channels = v_channels
        original(self, config, *args, **kw)

    return __init__


PATCHES = (
    Patch(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        accept_channels,
        "multi-latent attention on one rank",
        parameters=("config",),
        otherwise="a model with multi-latent attention could not be built",
    ),
    replace_torch_norm,
    Patch(
        "megatron.training.initialize:_warmup_jit_function",
        no_warm_up,
        "a warm-up that draws random numbers before the weights",
        otherwise="initial weights would depend on the number of ranks",
        required=False,
    ),
    Patch(
        "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
        lambda original: lambda module: False,
        "layers for inference, whose classes Megatron lacks without Transformer Engine",
        required=False,
    ),
    replace_dot_product_attention,
)


def use_compiled_helper() -> None:
    """Skip Megatron's compilation of its dataset helper if the helper can be imported; imports megatron.core.

    At start-up Megatron runs ``make`` beside the helper and exits if that fails; a wheel has no Makefile.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return
    target, reason = "megatron.core.datasets.utils:compile_helpers", "the dataset helper of a wheel, which is compiled"
    patching.install([Patch(target, lambda original: lambda: None, reason, required=False)], "process")
