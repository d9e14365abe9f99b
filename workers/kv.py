"""KV memory as tensors: one pool of blocks per layer.

Legend: B blocks, K key-value heads, P positions per block, H head size, T tokens, L positions.

A block of one head is one contiguous run of P x H values, so a kernel that reads a sequence's
history reads long runs. Which block belongs to whom is `schedulers.blocks`' affair; here are only
the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.mapped import mapped_zeros


class LayerKV(NamedTuple):
    """Keys and values of one layer."""

    k_BKPH: Tensor
    v_BKPH: Tensor

    def write(self, rows_R: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Store keys and values of tokens; `rows_R` is from `KVPool.rows`, with R = T x K."""
        head_size = self.k_BKPH.shape[-1]
        self.k_BKPH.view(-1, head_size).index_copy_(0, rows_R, k_TKH.reshape(-1, head_size))
        self.v_BKPH.view(-1, head_size).index_copy_(0, rows_R, v_TKH.reshape(-1, head_size))

    def read(self, blocks_B: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values at positions [begin, end) of the sequence with that block table, each of
        shape (K, L, H).
        """
        return _gather(self.k_BKPH, blocks_B, begin, end), _gather(
            self.v_BKPH, blocks_B, begin, end
        )


class KVPool:
    """KV memory of one engine.

    Untouched blocks take no memory on a CPU: the system maps a page when it is first written.
    `memory` is one piece a layer; `layers` are its keys and values as the torch code has them. A
    backend of another layout divides the same pieces in its own way.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool = False,
    ) -> None:
        """Raises RuntimeError, MemoryError or torch.OutOfMemoryError when the device has not that
        much.

        Args:
            num_layers: of the model.
            num_blocks: B.
            num_kv_heads: K.
            block_size: P.
            head_size: H.
            dtype: of keys and values.
            device: where they are.
            shared: all layers have the same memory, for passes that need nothing of a layer when
                the next one begins.
        """
        shape = (2, num_blocks, num_kv_heads, block_size, head_size)
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        num_pieces = 1 if shared else num_layers
        pieces = tuple(_zeros(shape, dtype, device) for _ in range(num_pieces))
        self.memory = pieces * (num_layers // num_pieces)
        self.layers = tuple(LayerKV(*memory) for memory in self.memory)

    def rows(self, blocks_T: np.ndarray, offsets_T: np.ndarray) -> np.ndarray:
        """Rows of a layer's memory, seen as (B x K x P, H), where the heads of each token go."""
        heads_K = np.arange(self.num_kv_heads)
        rows_TK = (blocks_T[:, None] * self.num_kv_heads + heads_K) * self.block_size
        return (rows_TK + offsets_T[:, None]).reshape(-1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return mapped_zeros(shape, dtype)


def _gather(pool_BKPH: Tensor, blocks_B: Tensor, begin: int, end: int) -> Tensor:
    _, num_kv_heads, block_size, head_size = pool_BKPH.shape
    first = begin // block_size
    some_BKPH = pool_BKPH.index_select(0, blocks_B[first : -(-end // block_size)])
    all_KLH = some_BKPH.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    return all_KLH[:, begin - first * block_size : end - first * block_size]
