"""Host waits beside attention itself (``test_cuda_branches.py``), and their detection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from equipment.cuda.calls import RANK, RANKS, Peerless, Softmax, leaf
from equipment.cuda.device import CUDA, Start, once_warm
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.attention.recompute import Recomputed
from cp_plugin.engine.attention.shift import shift
from cp_plugin.engine.inference.session import Session
from cp_plugin.engine.kernels import merge


@pytest.mark.parametrize(
    ("provider", "fp8"),
    [*((name, None) for name in ("ring", "attention2d", "all_gather", "ulysses", "needed")), ("needed", "comm")],
)
def test_documents_of_the_next_micro_batch(gpu: Start, provider: str, fp8: str | None) -> None:
    """Their tables are new, and are copied to the device without waiting."""
    device = gpu()
    batches = [Softmax(provider=provider, mask="documents", documents=(0, n, 70 + n, 128), fp8=fp8) for n in (9, 30)]
    cp = batches[0].context_parallel()
    once_warm(device, lambda: batches.pop(0).run(cp))
    assert device.ops.counts["_to_copy"], "nothing was new"


def test_recomputation(gpu: Start) -> None:
    """A layer with recomputed activations but not recomputed attention."""
    device, case = gpu(), Softmax(provider="ring", layout="zigzag")
    cp = case.context_parallel()

    def call() -> None:
        def layer(*inputs: Tensor) -> Tensor:
            return case.forward(cp, [x * 2 for x in inputs])

        inputs = case.inputs()
        out = checkpoint(Recomputed(layer), *inputs, use_reentrant=False, preserve_rng_state=False)
        torch.autograd.grad(out, inputs, torch.empty_like(out))

    once_warm(device, call)
    assert device.ops.counts["mul"] >= 2 * 3, "the layer was not recomputed"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("by", [1, -1])
def test_shift_of_multi_token_prediction(gpu: Start, layout: str, by: int) -> None:
    device = gpu()
    cp = ContextParallel("ring", mesh=Peerless({"cp": RANKS}, RANK), layout=layout)
    x = torch.empty(32, 2, 16, device=CUDA, requires_grad=True)

    def call() -> None:
        shifted = shift(cp, x, by=by)
        torch.autograd.grad(shifted, x, torch.empty_like(shifted))

    once_warm(device, call)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_short_convolution_of_the_next_micro_batch(gpu: Start, layout: str) -> None:
    """Its documents are new, and so are their tables."""
    device = gpu()
    batches = [torch.tensor((0, n, 70 + n, 128)) for n in (9, 30)]
    cp = ContextParallel("lasp2", mesh=Peerless({"cp": RANKS}, RANK), layout=layout)
    inputs = tuple(leaf(*shape) for shape in ((32, 2, 16), (16, 4), (16,)))

    def call() -> None:
        out = short_convolution(cp, *inputs, cu_seqlens=batches.pop(0))
        torch.autograd.grad(out, inputs, torch.empty_like(out))

    once_warm(device, call)
    assert device.ops.counts["triton _forward_kernel"] == 1, "one launch"


@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_of_decode(gpu: Start, fp8: bool) -> None:
    """Layers do not wait; a step copies its positions once, before the first layer."""
    device, case = gpu(), Softmax(provider="ring")
    cp = case.context_parallel()
    session = Session(cp, batch=2, capacity=64, mesh=Peerless({"cp": RANKS}, RANK), fp8=fp8, device=CUDA)

    def tokens(n: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (torch.empty(n, 2, 8, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(3))
        return q, k, v

    with session.prefill(128):
        session.attend("layer", *tokens(32))
    session.close([100, 128])
    with session.decode():
        once_warm(device, lambda: session.attend("layer", *tokens(1)))


@pytest.mark.parametrize("bounds", [None, (0, 50, 128)], ids=["one document", "a pack"])
def test_a_step_of_transformers(gpu: Start, bounds: tuple[int, ...] | None) -> None:
    """Positions and bounds are compared on the device, and the answer is read in the next compared call."""
    transformers = pytest.importorskip("transformers")
    from cp_plugin import huggingface
    from cp_plugin.huggingface.model import forwards

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    cp = ContextParallel("ring", mesh=Peerless({"cp": RANKS}, RANK))
    huggingface.apply(model, cp, check=False)
    calls = forwards(model)[0].division.calls
    calls.number = 100
    cu = None if bounds is None else torch.tensor(bounds)
    whole = huggingface.shard(cp, torch.randint(64, (1, 128)), cu_seq_lens_q=cu)
    device = gpu()
    model.to(CUDA)
    batch = {key: x.to(CUDA) if isinstance(x, Tensor) else x for key, x in whole.items()}
    once_warm(device, lambda: model(**batch).loss.backward())
    calls.number = 127
    with pytest.raises(ValueError, match=r"in an earlier call: .* must be those"):  # all it reads is zero
        model(**batch)


PLANTED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "item"),
    "tolist": (lambda x: x.flatten()[:2].tolist(), "tolist"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "an index by a mask"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "cpu indices": (lambda x: x[torch.tensor([0, 1])], "indices on the CPU"),
    "new tensor": (lambda x: torch.tensor([1, 2], device=x.device), "of a list or number"),
    "to device": (lambda x: torch.ones(3).to(x.device), "not pinned"),
    "to host": (lambda x: x.cpu(), "cpu|to the host"),
    "copy_": (lambda x: torch.zeros(x.shape).copy_(x), "to the host"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "synchronize"),
    "repeats": (lambda x: x.flatten()[:2].repeat_interleave(torch.empty(2, dtype=torch.int64, device=CUDA)), "repeat"),
    "isin": (lambda x: torch.isin(x.flatten()[:64], x.flatten()[:64]), "isin"),
    "CPU number": (lambda x: torch.where(x > 0, x, torch.tensor(1.0)), "where of a CPU tensor"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wait_is_found_and_named(gpu: Start, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, word = PLANTED[name]
    merged = merge.merge

    def with_fault(a: object, b: object) -> object:
        result = merged(a, b)  # type: ignore[arg-type]
        if result is not None:
            fault(result.out)
        return result

    monkeypatch.setattr(merge, "merge", with_fault)
    device, case = gpu(), Softmax(provider="ring", backend="sdpa", ranks=2)
    cp = case.context_parallel()
    with pytest.raises(
        AssertionError,
        match=rf"waits for the device:\n(.*\n)*cp_plugin/engine/kernels/merge\.py:\d+ merge_rows: .*{word}",
    ):
        once_warm(device, lambda: case.run(cp))
