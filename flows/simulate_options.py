"""The options of `flows simulate`: what goes together, and what their values may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flows.errors import SpecError
from schedulers.policies import POLICIES
from schedulers.sim.hardware import HARDWARE

DEFAULT_ROWS = 1000
REPLAYED = ("job", "calibration")
"""Hardware that a recording tells of."""
COUNTS = ("rows", "concurrency", "max_seqs", "max_batch_tokens", "capacity_tokens")


class Synthetic(NamedTuple):
    """Mean lengths of made-up rows."""

    prompt_tokens: float
    output_tokens: float


class Asked(NamedTuple):
    """What is to be simulated; None: the recording."""

    synthetic: Synthetic | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What was given on the command line; None: it was not.

    Attributes:
        output: of a job, to be replayed.
        synthetic: mean prompt and output tokens of made-up rows, `PROMPT:OUTPUT`.
        rows: number of made-up rows.
        concurrency: requests in flight.
        policy: a name in `POLICIES`, or "all".
        hardware: "job", "calibration", or a name in `HARDWARE`.
        max_seqs: most sequences that hold KV memory.
        max_batch_tokens: most tokens of a step.
        capacity_tokens: KV memory.
        seed: of the made-up rows.
        credentials: Prefect block for an s3:// output.
    """

    output: str | None = None
    synthetic: str | None = None
    rows: int | None = None
    concurrency: int | None = None
    policy: str | None = None
    hardware: str | None = None
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    capacity_tokens: int | None = None
    seed: int | None = None
    credentials: str | None = None

    @property
    def num_rows(self) -> int:
        return DEFAULT_ROWS if self.rows is None else self.rows

    @property
    def is_as_recorded(self) -> bool:
        """Nothing is asked for that the recorded job did not have."""
        changes = (self.concurrency, self.max_seqs, self.max_batch_tokens, self.capacity_tokens)
        return (self.hardware or "job") in REPLAYED and not any(changes)

    def checked(self) -> Asked:
        """What is to be simulated.

        Raises:
            SpecError: an option has a wrong value, or does not go with another.
        """
        found = next(_faults(self), None)
        if found is not None:
            raise SpecError(found)
        return Asked(None if self.synthetic is None else _synthetic(self.synthetic))


def _faults(options: SimulateOptions) -> Iterator[str]:
    """What is wrong, each with the way out."""
    yield from _source_faults(options)
    policies, hardware = [*POLICIES, "all"], [*REPLAYED, *HARDWARE]
    if options.policy is not None and options.policy not in policies:
        yield f"--policy is {options.policy!r}; choose from {', '.join(policies)}"
    if options.hardware is not None and options.hardware not in hardware:
        yield f"--hardware is {options.hardware!r}; choose from {', '.join(hardware)}"
    for name in COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} is {value}; it must be at least 1"
    if options.seed is not None and options.seed < 0:
        yield f"--seed is {options.seed}; it must be at least 0"
    seqs, tokens = options.max_seqs, options.max_batch_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        yield (
            f"--max-seqs is {seqs}, but --max-batch-tokens {tokens} lets only {tokens} sequences "
            "take a step together; raise it, or lower --max-seqs"
        )


def _source_faults(options: SimulateOptions) -> Iterator[str]:
    if options.output is None and options.synthetic is None:
        yield "nothing to simulate; give OUTPUT, a job to replay, or --synthetic PROMPT:OUTPUT"
    if options.output is not None and options.synthetic is not None:
        yield (
            f"OUTPUT ({options.output}) and --synthetic {options.synthetic} are both given; give "
            "one of them"
        )
    if options.synthetic is None:
        for name, value in (("--rows", options.rows), ("--seed", options.seed)):
            if value is not None:
                yield f"{name} {value} is for --synthetic; a replay takes the rows of the job"
    elif options.hardware in REPLAYED:
        yield (
            f"--hardware {options.hardware} needs a job; give OUTPUT in place of --synthetic, or "
            f"one of {', '.join(HARDWARE)}"
        )


def _synthetic(text: str) -> Synthetic:
    match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text.strip())
    if match is None or float(match[1]) < 1 or float(match[2]) < 1:
        raise SpecError(
            f"--synthetic is {text!r}; give mean prompt and output tokens, each at least 1, such "
            "as 512:256"
        )
    return Synthetic(float(match[1]), float(match[2]))
