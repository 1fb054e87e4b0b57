"""What a rank keeps of one layer, in the model's dtype or in one byte an element.

    Heads     keys and values of each head
    Latents   multi-latent attention: one vector a token, of which a matrix makes the keys and values of all heads

In one byte: e4m3 and a power of two for each (token, batch, head), as payloads travel with ``--cp-fp8 comm``
(``cp_plugin.core.payload``, blocks of one token, since tokens come one by one).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cp_plugin.core import payload
from cp_plugin.kernels import fused


class Kept(NamedTuple):
    """Rows ``[n, b, h, d]`` as they are kept: numbers, or bytes and their exponents ``[n, b, h]``."""

    rows: Tensor
    exponents: Tensor | None


class Store(Protocol):
    """Rows ``[b, h, d]`` in slots."""

    def put(self, first: int, x: Tensor) -> None:
        """Keep ``x [n, b, h, d]`` in the slots from ``first`` on."""
        ...

    def put_at(self, slots: Tensor, sequences: Tensor, x: Tensor) -> None:
        """Keep ``x [n, h, d]``, each in its slot of its sequence (int64 ``[n]``)."""
        ...

    def get(self, first: int, stop: int) -> Tensor:
        """The slots ``first .. stop - 1``: ``[n, b, h, d]`` in the model's dtype; not to be written to."""
        ...

    def kept(self, slots: int) -> Kept:
        """So many slots, the first ones, as they are; not to be written to."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes, full or empty."""
        ...


class Plain:
    """In the model's dtype."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._x = torch.zeros(shape, dtype=dtype, device=device)

    def put(self, first: int, x: Tensor) -> None:
        self._x[first : first + x.size(0)] = x

    def put_at(self, slots: Tensor, sequences: Tensor, x: Tensor) -> None:
        self._x[slots, sequences] = x

    def get(self, first: int, stop: int) -> Tensor:
        return self._x[first:stop]

    def kept(self, slots: int) -> Kept:
        return Kept(self._x[:slots], None)

    @property
    def nbytes(self) -> int:
        return self._x.nbytes


class Packed:
    """In one byte an element, and one more for each row."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError for a dtype that cannot be packed."""
        if dtype not in payload.DTYPES:
            raise ValueError(f"an FP8 cache holds {payload.DTYPES}, got {dtype}")
        self._dtype = dtype
        self._bytes = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._exponents = torch.ones(shape[:3], dtype=torch.uint8, device=device)

    def put(self, first: int, x: Tensor) -> None:
        rows, exponents = fused.pack(x.contiguous(), 1)
        self._bytes[first : first + x.size(0)] = rows.view(torch.uint8)
        self._exponents[first : first + x.size(0)] = exponents

    def put_at(self, slots: Tensor, sequences: Tensor, x: Tensor) -> None:
        if not len(slots):
            return
        rows, exponents = fused.pack(x.unsqueeze(1).contiguous(), 1)
        self._bytes[slots, sequences] = rows.view(torch.uint8).squeeze(1)
        self._exponents[slots, sequences] = exponents.squeeze(1)

    def get(self, first: int, stop: int) -> Tensor:
        return fused.unpack(self._bytes[first:stop], self._exponents[first:stop], 1, self._dtype)

    def kept(self, slots: int) -> Kept:
        return Kept(self._bytes[:slots], self._exponents[:slots])

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes + self._exponents.nbytes


class Latent(NamedTuple):
    """What multi-latent attention makes keys and values of (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    rows: Tensor
    """``[s, b, 1, r + p]``: compressed keys and values, and behind them the rotated part of the keys."""
    up_k: Tensor
    """``[h, d - p, r]``: the rest of head h's key is ``up_k[h] @ compressed``."""
    up_v: Tensor
    """``[h, e, r]``: its value."""


class Heads:
    """Keys ``[capacity, b, g, d]`` and values ``[capacity, b, g, e]``."""

    def __init__(self, kind: type[Plain] | type[Packed], capacity: int, k: Tensor, v: Tensor) -> None:
        """k, v: tensors like those to come."""
        self._keys = kind((capacity, *k.shape[1:]), k.dtype, k.device)
        self._values = kind((capacity, *v.shape[1:]), v.dtype, v.device)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def put(self, first: int, k: Tensor, v: Tensor, latent: Latent | None) -> None:
        self._keys.put(first, k)
        self._values.put(first, v)

    def put_at(
        self, slots: Tensor, sequences: Tensor, tokens: Tensor, k: Tensor, v: Tensor, latent: Latent | None
    ) -> None:
        self._keys.put_at(slots, sequences, k[tokens, sequences])
        self._values.put_at(slots, sequences, v[tokens, sequences])

    def whole(self, first: int, stop: int, latent: Latent | None) -> tuple[Tensor, Tensor]:
        """Keys and values of each head."""
        return self.get(first, stop)

    def get(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """What queries attend to."""
        return self._keys.get(first, stop), self._values.get(first, stop)

    def kept(self, slots: int) -> tuple[Kept, Kept | None]:
        """The same of the first slots, as they are kept."""
        return self._keys.kept(slots), self._values.kept(slots)

    def queries(self, q: Tensor, latent: Latent | None) -> Tensor:
        """Queries for what ``get`` returns."""
        return q

    def outputs(self, out: Tensor, latent: Latent | None) -> Tensor:
        """Outputs from those over the values that ``get`` returns."""
        return out


class Latents:
    """``[capacity, b, 1, r + p]``. Decode does not make keys of them: queries are multiplied instead, and outputs."""

    def __init__(self, kind: type[Plain] | type[Packed], capacity: int, latent: Latent) -> None:
        """latent: like those to come."""
        rows = latent.rows
        self._rows = kind((capacity, *rows.shape[1:]), rows.dtype, rows.device)
        self._compressed = latent.up_k.size(2)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def put(self, first: int, k: Tensor, v: Tensor, latent: Latent | None) -> None:
        assert latent is not None
        self._rows.put(first, latent.rows)

    def put_at(
        self, slots: Tensor, sequences: Tensor, tokens: Tensor, k: Tensor, v: Tensor, latent: Latent | None
    ) -> None:
        assert latent is not None
        self._rows.put_at(slots, sequences, latent.rows[tokens, sequences])

    def whole(self, first: int, stop: int, latent: Latent | None) -> tuple[Tensor, Tensor]:
        assert latent is not None
        rows = self._rows.get(first, stop)
        compressed, rotated = rows.split((self._compressed, rows.size(3) - self._compressed), 3)
        k = torch.einsum("sbxr,hdr->sbhd", compressed, latent.up_k)
        v = torch.einsum("sbxr,her->sbhe", compressed, latent.up_v)
        return torch.cat((k, rotated.expand(-1, -1, k.size(2), -1)), 3), v.contiguous()

    def get(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = self._rows.get(first, stop)
        return rows, rows[..., : self._compressed]

    def kept(self, slots: int) -> tuple[Kept, Kept | None]:
        return self._rows.kept(slots), None

    def queries(self, q: Tensor, latent: Latent | None) -> Tensor:
        assert latent is not None
        plain = latent.up_k.size(1)
        return torch.cat((torch.einsum("sbhd,hdr->sbhr", q[..., :plain], latent.up_k), q[..., plain:]), 3)

    def outputs(self, out: Tensor, latent: Latent | None) -> Tensor:
        assert latent is not None
        return torch.einsum("sbhr,her->sbhe", out, latent.up_v.to(out.dtype))
