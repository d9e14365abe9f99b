"""The time below which no engine can do a workload on this machine, whatever its batching.

The floor counts matrix products at the best measured rate and one read of each sequence's keys and
values per decoded token at the measured copy bandwidth; attention's own products, small operations
and steps that are not full cost nothing in it. Every prompt and output token but a row's last one
passes the layers once; the output projection is computed once per output token. A prefix that a
group of prompts shares passes the layers once, and its keys and values are read once in each of as
many steps as the longest answer of the group takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.bench.common import Item, Workload
from tests.bench.machine import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the floor needs to know of a model.

    `kv_bytes_per_token` counts keys and values of all layers.
    """

    layer_parameters: int
    head_parameters: int
    kv_bytes_per_token: int

    @classmethod
    def of_config(cls, config: dict[str, int], *, dtype_bytes: int) -> Shape:
        """From a Llama-like config.json: grouped attention, gated feed-forward, norms neglected."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        head_size = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * head_size + 2 * hidden * kv_heads * head_size
        feed_forward = 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(
            layer_parameters=layers * (attention + feed_forward),
            head_parameters=hidden * config["vocab_size"],
            kv_bytes_per_token=2 * layers * kv_heads * head_size * dtype_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    flops: float
    kv_read_bytes: float
    matrix_s: float
    memory_s: float

    @property
    def total_s(self) -> float:
        return self.matrix_s + self.memory_s


def floor_of(workload: Workload, shape: Shape, ceilings: Ceilings, *, dtype: str) -> Floor:
    """The floor of a workload with weights and products in bfloat16, float32 or int8."""
    shared = shared_work(workload)
    passes = workload.num_prompt_tokens + workload.num_output_tokens - len(workload.items)
    flops = 2.0 * (passes - shared.num_passes) * shape.layer_parameters
    flops += 2.0 * workload.num_output_tokens * shape.head_parameters
    positions = sum(
        num_context_positions(len(item.prompt_token_ids), item.num_output_tokens)
        for item in workload.items
    )
    kv_read_bytes = float((positions - shared.num_positions) * shape.kv_bytes_per_token)
    return Floor(
        flops=flops,
        kv_read_bytes=kv_read_bytes,
        matrix_s=flops / ceilings.matrix_rate(dtype),
        memory_s=kv_read_bytes / ceilings.copy_bytes_per_s,
    )


class SharedWork(NamedTuple):
    """What sharing prefixes saves: tokens through the layers, and positions read in decode."""

    num_passes: int
    num_positions: int


def shared_work(workload: Workload) -> SharedWork:
    groups: dict[int, list[Item]] = {}
    for item in workload.items:
        if item.group is not None:
            groups.setdefault(item.group, []).append(item)
    num_passes = num_positions = 0
    for items in groups.values():
        steps = [item.num_output_tokens - 1 for item in items]
        num_passes += (len(items) - 1) * items[0].num_prefix_tokens
        num_positions += (sum(steps) - max(steps)) * items[0].num_prefix_tokens
    return SharedWork(num_passes, num_positions)


def num_context_positions(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Positions that the decode steps of a sequence read; prefill gives its first output token."""
    num_steps = num_output_tokens - 1
    return num_steps * num_prompt_tokens + num_steps * (num_steps + 1) // 2
