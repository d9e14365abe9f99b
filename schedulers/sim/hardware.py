"""Hardware by name, for simulations: step costs of Qwen3-8B in float16, and its KV memory.

Source: `exclusive_batching.md` A2 and A8. The coefficients of prefill and decode are the shipped
ones. Those of mixed steps are not used as shipped: they are a fit of 1 / throughput, which holds
the fixed cost of a step already. Here the fixed cost (a decode step's, shared out over the tokens
that a step had in those runs: N = 1024, at most 8192 tokens) is taken out of 1 / throughput first,
and the quadratic goes through what is left, at the decode shares 1/9, 1/2 and 8/9. For the RTX PRO
6000, whose shipped fit is 1.3 to 1.5 times what the same paper's end-to-end runs say, the
throughput is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from schedulers.cost import StepCost


class Hardware(NamedTuple):
    """A device with a model.

    Attributes:
        cost: seconds of a step.
        capacity_tokens: KV positions.
        max_batch_tokens: B.
        max_seqs: most sequences in flight.
    """

    cost: StepCost
    capacity_tokens: int
    max_batch_tokens: int = 8192
    max_seqs: int = 2048


_H200 = StepCost(
    alpha_p=1.279e-3, beta_p=2.485e-5, alpha_d=8.921e-3, beta_d=4.586e-5,
    alpha_mb=8.921e-3, mix_a=2.476e-5, mix_b=4.372e-5, mix_c=1.443e-5,
)  # fmt: skip
_RTX = StepCost(
    alpha_p=4.691e-3, beta_p=5.008e-5, alpha_d=1.0376e-2, beta_d=1.0388e-4,
    alpha_mb=1.0376e-2, mix_a=7.005e-5, mix_b=1.1495e-4, mix_c=-2.442e-5,
)  # fmt: skip
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "h200": Hardware(_H200, 780_000),
        "h200-e2e": Hardware(replace(_H200, beta_d=_H200.beta_d + 1.57e-5), 780_000),
        "rtx-pro-6000": Hardware(_RTX, 460_000),
        "rtx-pro-6000-e2e": Hardware(replace(_RTX, beta_d=_RTX.beta_d + 3.6e-5), 460_000),
    }
)
"""By name. The `-e2e` ones charge a decode token what the paper's end-to-end runs of exclusive
batching leave unexplained by its micro-benchmarks (15.7 and 36 us: longer contexts than 512,
sampling, scheduling), as their mixed coefficients, which come from end-to-end runs, hold it too."""
