"""KV memory as tensors. Which block belongs to whom is `schedulers.blocks`' business.

Legend: B blocks, K key-value heads, P positions per block, H head size, T tokens of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerKV(NamedTuple):
    """Keys and values of one layer. A block's positions of one head lie side by side."""

    k_BKPH: Tensor
    v_BKPH: Tensor

    def write(self, block_T: Tensor, offset_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Store the keys and values of a step's tokens in their slots."""
        self.k_BKPH[block_T, :, offset_T] = k_TKH
        self.v_BKPH[block_T, :, offset_T] = v_TKH

    def gather(self, blocks_M: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` positions of one sequence: two of (K, length, H)."""
        num_kv_heads, head_size = self.k_BKPH.shape[1], self.k_BKPH.shape[3]

        def take(pool_BKPH: Tensor) -> Tensor:
            picked = pool_BKPH.index_select(0, blocks_M).transpose(0, 1)
            return picked.reshape(num_kv_heads, -1, head_size)[:, :length]

        return take(self.k_BKPH), take(self.v_BKPH)


class KVPool:
    """The pool of all layers.

    Args:
        num_layers: layers with keys and values.
        num_blocks: blocks.
        block_size: positions per block.
        num_kv_heads: heads.
        head_size: per head.
        dtype: of keys and values.
        device: where.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks, num_kv_heads, block_size, head_size)
        # Not zeroed: untouched pages cost nothing, and no position is read before it is written.
        self.layers = [
            LayerKV(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
            for _ in range(num_layers)
        ]
