"""Encoding and writing of partitioned texts in virtual time, for predictions and ablations.

Source: `surge.md` 3.4. One encoder, one writer, and between them a queue. A call's texts are in
memory from the start of its encoding until what was made of them is durable; a call starts when the
one before it is encoded and at most `queue_depth` are in memory:

    start_k = max(encoded_{k-1}, written_{k-1-q})
    written_k = max(encoded_k, written_{k-1}) + w_k

So with q = 0 everything is done in turn, sum(e_k + w_k), and with q = 1 writing hides behind
encoding, sum max(e_k, w_{k-1}).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from schedulers.encode_cost import EncodeCost
from schedulers.superbatch import Thresholds, form_superbatches, slices

EncodePolicy = Literal["per_partition", "fixed_batch", "superbatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCost:
    """Seconds of the writer.

    Attributes:
        commit_s: per commit: the marker, flushing to disk.
        partition_s: per partition: its file.
        text_s: per text: its vector, from memory to the file.
    """

    commit_s: float = 0.0
    partition_s: float = 0.0
    text_s: float = 0.0


class EncodeCall(NamedTuple):
    """One encode call.

    Attributes:
        num_texts: of it.
        num_partitions: whose last text is in it: their files are written and whole behind it.
        commits: it ends what is committed together. All but the last slice of an oversize partition
            do not.
    """

    num_texts: int
    num_partitions: int
    commits: bool = True


class PipelineResult(NamedTuple):
    """What came of it.

    Attributes:
        makespan_s: until everything is durable.
        first_output_s: until the first commit is.
        peak_texts: most in memory at a time.
        num_calls: K.
        num_texts: N.
        encode_s: in which the encoder worked.
        write_s: in which the writer did.
    """

    makespan_s: float
    first_output_s: float
    peak_texts: int
    num_calls: int
    num_texts: int
    encode_s: float
    write_s: float

    @property
    def texts_per_s(self) -> float:
        return self.num_texts / self.makespan_s if self.makespan_s else 0.0


def superbatch_calls(sizes: Iterable[int], thresholds: Thresholds) -> Iterator[EncodeCall]:
    """One call for each superbatch, or for each slice of an oversize partition."""
    for item in form_superbatches(sizes, thresholds):
        ranges = list(slices(item.num_texts, thresholds.max_texts))
        for start, stop in ranges[:-1]:
            yield EncodeCall(stop - start, 0, commits=False)
        start, stop = ranges[-1]
        yield EncodeCall(stop - start, item.num_partitions)


def partition_calls(sizes: Iterable[int]) -> Iterator[EncodeCall]:
    """One call for each partition, whatever its size."""
    for size in sizes:
        yield EncodeCall(size, 1)


def batch_calls(sizes: Sequence[int], batch_texts: int) -> Iterator[EncodeCall]:
    """All texts in batches of one size across partitions, none of which commits: what belongs to
    which partition is only sorted out behind the last.
    """
    total = sum(sizes)
    for start in range(0, total, batch_texts):
        last = start + batch_texts >= total
        num_texts = min(batch_texts, total - start)
        yield EncodeCall(num_texts, len(sizes) if last else 0, commits=last)


def run_pipeline(
    calls: Iterable[EncodeCall], cost: EncodeCost, write: WriteCost, *, queue_depth: int
) -> PipelineResult:
    """Encode and write calls in their order, with q = `queue_depth` calls in memory beside the one
    that is encoded; 0 writes in turn.
    """
    encoded_s = written_s = encode_s = write_s = 0.0
    first_output_s: float | None = None
    # What is in memory: when it is written, and its texts. The last may be still encoding.
    inside: deque[tuple[float, int]] = deque()
    num_calls = num_texts = resident = peak = 0
    for call in calls:
        start_s = encoded_s
        if len(inside) > queue_depth:
            start_s = max(start_s, inside[-1 - queue_depth][0])
        while inside and inside[0][0] <= start_s:
            resident -= inside.popleft()[1]
        call_s = cost.call_of(call.num_texts) + call.num_partitions * cost.partition_s
        after_s = _write_s(call, write)
        encoded_s = start_s + call_s
        written_s = max(encoded_s, written_s) + after_s
        inside.append((written_s, call.num_texts))
        resident += call.num_texts
        peak = max(peak, resident)
        if call.commits and first_output_s is None:
            first_output_s = written_s
        num_calls += 1
        num_texts += call.num_texts
        encode_s += call_s
        write_s += after_s
    first_s = 0.0 if first_output_s is None else first_output_s
    return PipelineResult(written_s, first_s, peak, num_calls, num_texts, encode_s, write_s)


def _write_s(call: EncodeCall, write: WriteCost) -> float:
    return (
        call.commits * write.commit_s
        + call.num_partitions * write.partition_s
        + call.num_texts * write.text_s
    )


def run_held(calls: Iterable[EncodeCall], cost: EncodeCost, write: WriteCost) -> PipelineResult:
    """Encode everything, then write everything: all texts are in memory, and nothing comes before
    the end.
    """
    made = list(calls)
    num_texts = sum(call.num_texts for call in made)
    num_partitions = sum(call.num_partitions for call in made)
    encode_s = sum(cost.call_of(call.num_texts) for call in made)
    encode_s += num_partitions * cost.partition_s
    write_s = _write_s(EncodeCall(num_texts, num_partitions), write) if made else 0.0
    end_s = encode_s + write_s
    return PipelineResult(end_s, end_s, num_texts, len(made), num_texts, encode_s, write_s)


def simulate(
    policy: EncodePolicy,
    sizes: Sequence[int],
    cost: EncodeCost,
    write: WriteCost,
    *,
    thresholds: Thresholds,
    queue_depth: int = 1,
) -> PipelineResult:
    """A policy over partitions of these sizes, in their order.

    Args:
        policy: how texts come into calls.
        sizes: texts of each partition.
        cost: of the encoder; its `partition_s` is spent there, that of `write` in the writer.
        thresholds: of superbatches; a fixed batch has `max_texts` texts.
        write: of the writer.
        queue_depth: q; a fixed batch has none.
    """
    if policy == "fixed_batch":
        return run_held(batch_calls(sizes, thresholds.max_texts), cost, write)
    calls = (
        partition_calls(sizes) if policy == "per_partition" else superbatch_calls(sizes, thresholds)
    )
    return run_pipeline(calls, cost, write, queue_depth=queue_depth)
