"""GPU families by compute capability: the order in which ``auto`` tries backends, and their speeds.

The order is a preference; ``unsupported`` says whether a kernel is installed, can run, and is deterministic where that
is required. Speeds, whose ratios alone matter, decide between a library in tiles and our kernel in one launch
(``kernels.cost``). They are published figures, none of this project's; for our kernel they are its targets in
``ci/gpu``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Rate(NamedTuple):
    """TFLOP/s on visible pairs in bfloat16, heads of 128, 16k tokens; a backward pass counts five products."""

    forward: float
    backward: float


class Candidate(NamedTuple):
    """A kernel that ``auto`` may choose."""

    backend: str
    rate: Rate | None
    """None: never weighed against our own kernel."""
    source: str
    generation: int | None = None
    """Of flash-attn; None for other kernels."""

    @property
    def title(self) -> str:
        return self.backend if self.generation is None else f"{self.backend} {self.generation}"


class Scale(NamedTuple):
    """Our kernel and the GPU, for comparison with a library's kernel."""

    own: Rate
    """Expected speed of our kernel."""
    source: str
    processors: int
    """Streaming multiprocessors of the family's usual GPU (data sheet)."""
    bytes_per_s: float
    """Achieved memory bandwidth (``cp_plugin/planner/machine/profiles/devices``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """GPUs of similar compute capabilities."""

    title: str
    since: tuple[int, int]
    """Lowest compute capability."""
    order: tuple[Candidate, ...]
    """Candidates of ``auto``, best first."""
    order_source: str
    scale: Scale | None
    """None: our kernels do not run there."""

    def candidate(self, backend: str, generation: int | None = None) -> Candidate | None:
        """That kernel's entry; without a generation its first."""
        return next((c for c in self.order if c.backend == backend and generation in (None, c.generation)), None)


LAUNCH_S = 5e-6
"""Kernel launch with the gap before the next: an assumption, as in ``cp_plugin/planner/machine/profiles/devices``."""
PLANS_EACH_SHAPE = ("te", "cudnn")
"""Kernels that build a plan per tile shape, which takes far longer than running it: cuDNN caches graphs by size (torch,
aten/src/ATen/native/cudnn/MHA.cpp; Transformer Engine, common/fused_attn).
"""

_FA2_PAPER = "arXiv 2307.08691 (FlashAttention-2), section 4.1: 73 % and 63 % of an A100's 312"
_FA3_PAPER = "arXiv 2407.08608 (FlashAttention-3), figures 5 and 6: H100 SXM, head size 128, 16k tokens"
_SAME = "the same kernels"
_TE_ORDER = "Transformer Engine prefers cuDNN to flash-attn from 9.0 on (dot_product_attention/utils.py)"
_TARGETS = "ci/gpu/performance.py wants 0.75 of torch's FlashAttention-2 forward, and 0.65 backward"
_OURS = (Candidate("triton", None, "takes what no library does"), Candidate("reference", None, "takes everything"))

_AMPERE = Family(
    title="Ampere, Ada",
    since=(8, 0),
    order=(
        Candidate("sdpa", Rate(228, 197), _FA2_PAPER),
        Candidate("flash", Rate(228, 197), _SAME, 2),
        Candidate("te", Rate(228, 197), "no figure found: taken as FlashAttention-2's"),
        Candidate("cudnn", Rate(228, 197), "no figure found: taken as FlashAttention-2's"),
        *_OURS,
    ),
    order_source="Transformer Engine prefers flash-attn to cuDNN below 9.0 (dot_product_attention/utils.py)",
    scale=Scale(Rate(171, 128), _TARGETS, processors=108, bytes_per_s=1.7e12),
)
_HOPPER = Family(
    title="Hopper",
    since=(9, 0),
    order=(
        Candidate("flash", Rate(648, 561), _FA3_PAPER, 3),
        Candidate("te", Rate(595, 516), f"cuDNN 9 in {_FA3_PAPER}"),
        Candidate("cudnn", Rate(595, 516), f"cuDNN 9 in {_FA3_PAPER}"),
        Candidate("flash", Rate(370, 322), "no figure found: taken as FlashAttention-2's", 4),
        Candidate("sdpa", Rate(370, 322), f"FlashAttention-2 in {_FA3_PAPER}"),
        Candidate("flash", Rate(370, 322), _SAME, 2),
        *_OURS,
    ),
    order_source=f"by these figures; {_TE_ORDER}. cuDNN 9.19 has 702 and 612 on an H200 "
    "(cudnn-frontend, benchmark/sdpa_benchmark_training), which would put it first",
    scale=Scale(Rate(278, 209), _TARGETS, processors=132, bytes_per_s=2.97e12),
)
_BLACKWELL = Family(
    title="Blackwell",
    since=(10, 0),
    order=(
        Candidate(
            "flash", Rate(1534, 1360), "FlashAttention-4, 4 x 8k tokens, B200: flash-attention pull request 2280", 4
        ),
        Candidate("te", Rate(1697, 1374), "cuDNN 9.22, GB200 (cudnn-frontend, benchmark/sdpa_benchmark_training)"),
        Candidate("cudnn", Rate(1697, 1374), "cuDNN 9.22, GB200 (cudnn-frontend, benchmark/sdpa_benchmark_training)"),
        Candidate("sdpa", Rate(370, 322), "no figure of FlashAttention-2 found: an H100's"),
        Candidate("flash", Rate(370, 322), _SAME, 2),
        *_OURS,
    ),
    order_source=f"FlashAttention-4 up to 1.3 times cuDNN 9.13 (arXiv 2603.05451), later ones caught up; {_TE_ORDER}",
    scale=Scale(
        Rate(568, 360),
        "FlashAttention-4's over 2.7, its advantage over Triton (arXiv 2603.05451); backward times 5/7, its products "
        "over ours",
        processors=148,
        bytes_per_s=7.35e12,
    ),
)
_BLACKWELL_12 = replace(
    _AMPERE, title="Blackwell without tensor memory", since=(12, 0), order_source="no figure found: as on 8.0"
)
_OLDER = Family(
    title="older than Ampere", since=(0, 0), order=_OURS[1:], order_source="every fused kernel needs 8.0", scale=None
)
FAMILIES = (_OLDER, _AMPERE, _HOPPER, _BLACKWELL, _BLACKWELL_12)
"""By increasing compute capability; newer devices belong to the last one."""
ELSEWHERE = ("sdpa", *(candidate.backend for candidate in _OURS))
"""Candidates of ``auto`` on devices other than CUDA, best first."""


def family(capability: tuple[int, int]) -> Family:
    """The family of a compute capability."""
    return next(known for known in reversed(FAMILIES) if capability >= known.since)
