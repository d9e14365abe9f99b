"""The layers that all families share.

Legend: T tokens of a batch, D hidden size, E width of a projection, I intermediate size, N query
heads, K key-value heads, A = N + 2 K heads of the fused projection, H head size, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from workers.mapped import mapped_zeros
from workers.models.config import ModelConfig, RopeConfig
from workers.models.weights import Place

ROPE_PAGE = 4096
"""Positions whose rotary table is computed at once. A fixed number, so that the values at a
position do not depend on what was asked for before.
"""


@dataclass(slots=True)
class Spent:
    """Seconds of a model's calls by kind of work, added up. Its layers write it."""

    products_s: float = 0.0
    attention_s: float = 0.0
    rows_s: float = 0.0
    head_s: float = 0.0


MIN_MAPPED_BYTES = 1 << 20


class Make:
    """Makes uninitialised parameters of one type on one device.

    Attributes:
        spent: shared by all that is made with it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.spent = Spent()

    def __call__(self, *shape: int) -> Tensor:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        if self.device.type == "cpu" and num_bytes >= MIN_MAPPED_BYTES:
            # Given back to the system as soon as it is dropped, when a weight has been packed.
            return mapped_zeros(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """A projection, possibly several fused ones. Its time counts as `products_s`."""

    def __init__(self, make: Make, num_outputs: int, num_inputs: int, *, bias: bool) -> None:
        self.weight_OI = make(num_outputs, num_inputs)
        self.bias_O = make(num_outputs) if bias else None
        self._spent = make.spent

    def __call__(self, x_TI: Tensor) -> Tensor:
        started_s = perf_counter()
        out_TO = functional.linear(x_TI, self.weight_OI, self.bias_O)
        self._spent.products_s += perf_counter() - started_s
        return out_TO

    def places(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[_Named]:
        """Places of the outputs [begin, end)."""
        weight = self.weight_OI[begin:end]
        yield f"{name}.weight", Place(weight, tuple(weight.shape))
        if self.bias_O is not None:
            bias = self.bias_O[begin:end]
            yield f"{name}.bias", Place(bias, tuple(bias.shape))


class RMSNorm:
    """Root mean square normalisation over the last dimension, in float32 inside."""

    def __init__(self, make: Make, size: int, eps: float) -> None:
        self.weight_D = make(size)
        self.eps = eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return functional.rms_norm(x_TD, self.weight_D.shape, self.weight_D, self.eps)

    def places(self, name: str) -> Iterator[_Named]:
        yield f"{name}.weight", Place(self.weight_D, tuple(self.weight_D.shape))


class HeadNorm:
    """RMSNorm of each q and k head, in one call; the weights of q and of k differ."""

    def __init__(self, make: Make, config: ModelConfig) -> None:
        self.num_heads = config.num_heads
        self.eps = config.rms_eps
        self.weight_AH = make(config.num_heads + config.num_kv_heads, config.head_size)

    def __call__(self, x_TAH: Tensor) -> Tensor:
        head_size = self.weight_AH.shape[1:]
        return functional.rms_norm(x_TAH, head_size, None, self.eps) * self.weight_AH

    def places(self, name: str) -> Iterator[_Named]:
        shape = (self.weight_AH.shape[1],)
        yield f"{name}.q_norm.weight", Place(self.weight_AH[: self.num_heads], shape)
        yield f"{name}.k_norm.weight", Place(self.weight_AH[self.num_heads :], shape)


class Rotary:
    """Rotary position embedding in the half-split form: a head is (first half, second half).

    With swap(x) the exchange of the halves, rotate(x) = x * cos + swap(x) * sin, where sin is
    negative in the first half.
    """

    def __init__(self, rope: RopeConfig, head_size: int, make: Make) -> None:
        self._frequencies = frequencies(rope, head_size)
        self._make = make
        self._cos_PH = make(0, head_size)
        self._sin_PH = make(0, head_size)

    def tables(self, position_T: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, 1, H), at positions of which `last` is the largest."""
        while last >= len(self._cos_PH):
            cos_PH, sin_PH = self._page(len(self._cos_PH))
            self._cos_PH = torch.cat([self._cos_PH, cos_PH])
            self._sin_PH = torch.cat([self._sin_PH, sin_PH])
        return self._cos_PH[position_T][:, None], self._sin_PH[position_T][:, None]

    def _page(self, begin: int) -> tuple[Tensor, Tensor]:
        position_P1 = torch.arange(begin, begin + ROPE_PAGE, dtype=torch.float32)[:, None]
        angle_PH = position_P1 * self._frequencies
        cos, sin = angle_PH.cos(), angle_PH.sin()
        both = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
        cos_PH, sin_PH = (half.to(self._make.device, self._make.dtype) for half in both)
        return cos_PH, sin_PH


def rotate_(x_TAH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
    """Rotate heads in place."""
    swapped_TAH = x_TAH.roll(x_TAH.shape[-1] // 2, dims=-1)
    torch.addcmul(x_TAH * cos_T1H, swapped_TAH, sin_T1H, out=x_TAH)


def frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Angle per position of each pair of a head, float32 of (H / 2,).

    Source of `llama3`: Meta's Llama 3.1 reference, `apply_scaling`: wavelengths longer than
    original_len / low_freq_factor are stretched, those shorter than original_len /
    high_freq_factor are kept, and between them the two are mixed linearly in the frequency.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    plain = 1.0 / rope.theta**exponent
    if rope.kind == "default":
        return plain
    stretched = plain / rope.factor
    if rope.kind == "linear":
        return stretched
    turns = rope.original_len * plain / (2 * torch.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return kept * plain + (1 - kept) * stretched


class DecoderLayer:
    """Attention and SwiGLU, each behind a norm and around a residual. The stream may be float32
    where the weights are not; its norms must have its type then.

    The attention itself lies between `project` and `finish`, as it alone looks beyond its row.
    """

    def __init__(self, config: ModelConfig, layer: int, make: Make) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size
        self.window = config.windows[layer]
        width = self.num_heads * self.head_size
        num_outputs = width + 2 * self.num_kv_heads * self.head_size
        self.attention_norm = RMSNorm(make, hidden, config.rms_eps)
        self.qkv = Linear(make, num_outputs, hidden, bias=config.attention_bias)
        self.head_norm = HeadNorm(make, config) if config.qk_norm else None
        self.out = Linear(make, hidden, width, bias=config.output_bias)
        self.mlp_norm = RMSNorm(make, hidden, config.rms_eps)
        self.gate_up = Linear(make, 2 * inner, hidden, bias=config.mlp_bias)
        self.down = Linear(make, hidden, inner, bias=config.mlp_bias)

    def project(self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
        """Heads of queries, keys and values, rotated: (T, A, H)."""
        normed_TD = self.attention_norm(x_TD).to(self.qkv.weight_OI.dtype)
        qkv_TAH = self.qkv(normed_TD).unflatten(1, (-1, self.head_size))
        qk_TAH = qkv_TAH[:, : self.num_heads + self.num_kv_heads]
        if self.head_norm is not None:
            qk_TAH.copy_(self.head_norm(qk_TAH))
        rotate_(qk_TAH, cos_T1H, sin_T1H)
        return qkv_TAH

    def finish(self, x_TD: Tensor, attended_TE: Tensor) -> Tensor:
        """What follows attention: its projection and the MLP. (T, D)"""
        x_TD = x_TD + self.out(attended_TE)
        normed_TD = self.mlp_norm(x_TD).to(self.gate_up.weight_OI.dtype)
        gate_TI, up_TI = self.gate_up(normed_TD).chunk(2, dim=1)
        return x_TD + self.down(functional.silu(gate_TI).mul_(up_TI))

    def places(self, name: str) -> Iterator[_Named]:
        """Names as Hugging Face gives them."""
        q_end = self.num_heads * self.head_size
        k_end = q_end + self.num_kv_heads * self.head_size
        inner = len(self.gate_up.weight_OI) // 2
        yield from self.attention_norm.places(f"{name}.input_layernorm")
        yield from self.qkv.places(f"{name}.self_attn.q_proj", 0, q_end)
        yield from self.qkv.places(f"{name}.self_attn.k_proj", q_end, k_end)
        yield from self.qkv.places(f"{name}.self_attn.v_proj", k_end)
        if self.head_norm is not None:
            yield from self.head_norm.places(f"{name}.self_attn")
        yield from self.out.places(f"{name}.self_attn.o_proj")
        yield from self.mlp_norm.places(f"{name}.post_attention_layernorm")
        yield from self.gate_up.places(f"{name}.mlp.gate_proj", 0, inner)
        yield from self.gate_up.places(f"{name}.mlp.up_proj", inner)
        yield from self.down.places(f"{name}.mlp.down_proj")


def in_tiles(function: Callable[..., Tensor], tile_rows: int | None, *tensors: Tensor) -> Tensor:
    """Apply a row-wise function to tiles of rows, or to all at once when `tile_rows` is None.

    In tiles every call has the same shapes, so a row's result does not depend on how many rows
    there are. The last tile is filled up with zeros.
    """
    if tile_rows is None:
        return function(*tensors)
    num_rows = len(tensors[0])
    padding = -num_rows % tile_rows
    padded = [torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) for x in tensors]
    tiles = zip(*(x.split(tile_rows) for x in padded), strict=True)
    done = [function(*tile) for tile in tiles]
    return torch.cat(done)[:num_rows] if done else function(*tensors)


_Named = tuple[str, Place]
