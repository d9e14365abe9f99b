"""From the raw runs of the throughput benchmark to what it says: medians, ratios, checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from tests.bench.common import Check
from tests.bench.floor import Floor
from tests.bench.sides import OURS
from tests.bench.workloads import FRESH

NEVER_COMPARED_IN_MEMORY = ("llamacpp",)
"""Engines of a few megabytes, without Python's libraries, which no Python process can be below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one side over one workload.

    Attributes:
        elapsed_s: from the prompts to the last answer, in a process that is ready.
        ready_s: from the start of that process until it was ready.
        first_token_s: from the start of that process to its first token.
        job_s: start-up included.
        peak_bytes: highest resident memory of its processes, each by itself, in sum.
    """

    workload: str
    side: str
    engine: str
    dtype: str
    round: int
    num_rows: int
    num_prompt_tokens: int
    num_output_tokens: int
    elapsed_s: float
    ready_s: float
    first_token_s: float
    job_s: float
    peak_bytes: int
    first_tokens_equal: float | None = None

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "output_tokens_per_s": self.output_tokens_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A side on a workload, as medians over rounds. Ratios are ours over this side's."""

    workload: str
    side: str
    engine: str
    dtype: str
    num_runs: int
    elapsed_s: float
    job_s: float
    ready_s: float
    first_token_s: float
    rows_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_bytes: float
    multiple_of_floor: float
    ratio: float
    ratio_with_start: float
    ratio_of_peaks: float
    first_tokens_equal: float | None


def lines_of(runs: Sequence[Run], floors: Mapping[str, Floor]) -> list[Line]:
    """A line for each side on each workload, in order of appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.side), []).append(run)
    return [
        _line(group, groups.get((workload, OURS), ()), floors[workload])
        for (workload, _), group in groups.items()
    ]


def _line(runs: Sequence[Run], ours: Sequence[Run], floor: Floor) -> Line:
    first, elapsed_s = runs[0], _median(runs, "elapsed_s")
    num_tokens = first.num_prompt_tokens + first.num_output_tokens
    return Line(
        workload=first.workload,
        side=first.side,
        engine=first.engine,
        dtype=first.dtype,
        num_runs=len(runs),
        elapsed_s=elapsed_s,
        job_s=_median(runs, "job_s"),
        ready_s=_median(runs, "ready_s"),
        first_token_s=_median(runs, "first_token_s"),
        rows_per_s=first.num_rows / elapsed_s,
        output_tokens_per_s=first.num_output_tokens / elapsed_s,
        total_tokens_per_s=num_tokens / elapsed_s,
        peak_bytes=_median(runs, "peak_bytes"),
        multiple_of_floor=elapsed_s / floor.total_s,
        ratio=elapsed_s / _median(ours, "elapsed_s"),
        ratio_with_start=_median(runs, "job_s") / _median(ours, "job_s"),
        ratio_of_peaks=_median(ours, "peak_bytes") / _median(runs, "peak_bytes"),
        first_tokens_equal=first.first_tokens_equal,
    )


def _median(runs: Sequence[Run], name: str) -> float:
    return median(float(getattr(run, name)) for run in runs)


def checks_of(lines: Sequence[Line], dtype: str) -> list[Check]:
    """What is claimed of a number format, as far as the runs can tell."""
    claims = {"bfloat16": _bfloat16_checks, "int8": _int8_checks}.get(dtype)
    return [*(claims(lines) if claims else ()), *_first_token_check(lines)]


def _bfloat16_checks(lines: Sequence[Line]) -> Iterator[Check]:
    peers = [line for line in lines if line.engine != OURS]
    for workload in ("mixed", "decode_heavy", "prefill_heavy"):
        yield from _best(peers, workload, "output tokens per second", 1.2)
    yield from _best(peers, "shared_prefix", "output tokens per second", 1.5)
    yield from _best(peers, "long_tail", "job time", 1.2)
    for engine, bound in (("vllm", 5.0), ("openvino", 1.0)):
        for line in peers:
            if (line.workload, line.engine) == (FRESH, engine):
                name = f"{FRESH}, start-up included: job time, in {line.side}'s"
                yield _at_least(name, line.ratio_with_start, bound)
    heavy = [line for line in peers if line.engine not in NEVER_COMPARED_IN_MEMORY]
    if heavy:
        worst = max(heavy, key=lambda line: line.ratio_of_peaks)
        told = f"peak memory, in the least of any peer but llama.cpp ({worst.workload})"
        yield Check(name=told, value=worst.ratio_of_peaks, bound=1.0, sense="<=")


def _int8_checks(lines: Sequence[Line]) -> Iterator[Check]:
    for dtype, bound in (("bfloat16", 1.8), ("int8", 1.1)):
        peers = [line for line in lines if line.engine != OURS and line.dtype == dtype]
        yield from _best(peers, "mixed", f"int8 against {dtype}: output tokens per second", bound)


def _best(lines: Sequence[Line], workload: str, what: str, bound: float) -> Iterator[Check]:
    there = [line for line in lines if line.workload == workload]
    if there:
        best = min(there, key=lambda line: line.elapsed_s)
        name = f"{workload}: {what}, in the best peer's ({best.side})"
        yield _at_least(name, best.ratio, bound)


def _first_token_check(lines: Sequence[Line]) -> Iterator[Check]:
    """Of processes that are started for one workload; the first process of all compiles the kernels
    where they are not cached yet.
    """
    ours = [line for line in lines if line.side == OURS]
    fresh = [line for line in ours if line.workload == FRESH] or ours
    if fresh:
        name = "seconds from the start of the process to the first token"
        value = median(line.first_token_s for line in fresh)
        yield Check(name=name, value=value, bound=4.0, sense="<=")


def _at_least(name: str, value: float, bound: float) -> Check:
    return Check(name=name, value=value, bound=bound, sense=">=")
