"""The lengths that a policy decides by: measured, or assumed before there are enough."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from schedulers.crossover import Lengths
from schedulers.lengths import Hazard, LengthWindow, fit_hazard, phase_slope
from schedulers.memory import Running, resident_moments
from schedulers.view import View


class Workload(NamedTuple):
    """Lengths at hand: of the last finished sequences, or assumed before there are enough.

    Attributes:
        hazard: fitted to the outputs of finished sequences.
        mean_prompt_tokens: that are computed; what shared prefixes bring is not.
        mean_output_tokens: by flow (see `LengthWindow`).
        context_tokens: positions that a decode token reads on average.
        phase_slope: how the hazard of the holders rises in a decode phase, per token.
        num_samples: finished sequences behind it; 0: assumed.
    """

    hazard: Hazard
    mean_prompt_tokens: float
    mean_output_tokens: float
    context_tokens: float
    phase_slope: float
    num_samples: int

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.mean_prompt_tokens, self.mean_output_tokens, self.context_tokens)

    @property
    def phase_hazard(self) -> float:
        """Chance that a holder ends at its next token: holders have all ages, so whatever the law
        of outputs it is 1 / mu_O.
        """
        return min(1.0, 1.0 / max(1.0, self.mean_output_tokens))


MIN_PRESENT = 30
"""Sequences in the system whose prompts tell more than those of the finished ones."""


class Present(NamedTuple):
    """What is in the system, as far as it is known: prompts, and the most that may be generated."""

    num_seqs: int
    mean_prompt_tokens: float
    mean_allowed_tokens: float

    @classmethod
    def of(cls, view: View) -> Present | None:
        """None when there is nothing."""
        present = [*view.running, *view.waiting]
        if not present:
            return None
        return cls(
            num_seqs=len(present),
            mean_prompt_tokens=fmean(seq.num_prompt_tokens for seq in present),
            mean_allowed_tokens=fmean(
                seq.max_total_tokens - seq.num_prompt_tokens for seq in present
            ),
        )


def measured_workload(lengths: LengthWindow, present: Present | None) -> Workload:
    """From finished sequences, at least one, and from what is present.

    The longest are admitted first, so those that finished are not like those to come: when enough
    are present, the prompts are theirs. What shared prefixes bring is not computed: it is taken off
    as the share that they brought to the finished ones.
    """
    items = lengths.recent
    outputs = [max(1, item.num_output_tokens) for item in items]
    hazard = fit_hazard(outputs)
    prompt = fmean(item.num_prompt_tokens for item in items)
    cached = sum(item.num_cached_tokens for item in items)
    shared = cached / sum(item.num_prompt_tokens for item in items)
    output = lengths.flow_mean_output_tokens
    if present is not None:
        output = min(output, present.mean_allowed_tokens)
        if present.num_seqs >= MIN_PRESENT:
            prompt = present.mean_prompt_tokens
    return Workload(
        hazard=hazard,
        mean_prompt_tokens=max(1.0, prompt * (1.0 - shared)),
        mean_output_tokens=max(1.0, output),
        context_tokens=resident_moments(items, 0).mean_tokens,
        phase_slope=phase_slope(hazard, outputs),
        num_samples=len(items),
    )


def assumed_workload(present: Present | None, cold_mean_output_tokens: float) -> Workload:
    """Before lengths are known: outputs of an assumed mean, or of what is allowed when that is
    less.
    """
    prompt = output = cold_mean_output_tokens
    if present is not None:
        prompt = present.mean_prompt_tokens
        output = max(1.0, min(output, present.mean_allowed_tokens))
    return Workload(
        hazard=Hazard(1.0 / output, 0.0),
        mean_prompt_tokens=prompt,
        mean_output_tokens=output,
        context_tokens=prompt + output,
        phase_slope=0.0,
        num_samples=0,
    )


def holders_of(view: View) -> Iterator[Running]:
    """The running sequences, as the memory-safe N is computed from them."""
    for seq in view.running:
        prompt = seq.num_prompt_tokens
        most = seq.max_total_tokens - prompt
        yield Running(prompt, seq.num_tokens - prompt, most, seq.admission)
