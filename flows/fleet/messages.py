"""What a coordinator and its workers say to each other. Everything here can be pickled.

    coordinator --Assign, Adopt, Give, Finish, Stop--> worker
    coordinator <--Ready, Started, Began, Rows, Block, Steps, Report, Given, Failed, Ended-- worker

A row is a worker's from the `Assign` or `Adopt` that names it to the `Rows` or `Block` that answers
it or the `Given` that hands it back.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flows.busy import Work
from flows.model import Model
from flows.queues import RowRef
from flows.spec import JobSpec
from schedulers.load import Load
from schedulers.memory import MemoryPlan
from storage.results import ResultRow
from storage.shards import Shard
from storage.source import Dataset
from workers.request import EventRecord, Resume, StepRecord

OpenModel = Callable[[JobSpec], Model]
Ordinals = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker needs to know of the job and of its own place.

    Attributes:
        spec: the job.
        dataset: its input, whose footers have been read.
        open_model: a function of a module, so that it can be pickled by name.
        num_workers: on this host; memory and cores are shared by them.
        step_timeout_s: a step that takes longer hangs.
        reports: tell of rows that start, and of the load: for a coordinator of several.
        max_texts: most rows of an encode call; 0: no job of encode calls.
    """

    spec: JobSpec
    dataset: Dataset
    open_model: OpenModel
    num_workers: int = 1
    step_timeout_s: float = 600.0
    reports: bool = False
    max_texts: int = 0


def dumps(message: object) -> bytes:
    """A message as bytes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Any:
    """A message from bytes that a coordinator and its own workers have sent each other."""
    return pickle.loads(data)  # noqa: S301 - nobody else has the socket


# -- to a worker --


class Assign(NamedTuple):
    """Rows of a shard to compute.

    Attributes:
        shard: which.
        ordinals: rows in it, sorted.
    """

    shard: Shard
    ordinals: Ordinals

    @property
    def num_rows(self) -> int:
        return len(self.ordinals)


class Parcel(NamedTuple):
    """A row whose prompt has been made, on its way to another worker."""

    ref: RowRef
    prompt_token_ids: tuple[int, ...]
    resume: Resume | None


class Adopt(NamedTuple):
    """Go on with rows that another worker has given back."""

    parcels: tuple[Parcel, ...]


class Give(NamedTuple):
    """Give back about `share_s` seconds of work; answered by `Given`, empty if there is none.

    Attributes:
        kv_bytes_per_s: how fast keys and values travel; 0: they do not.
    """

    share_s: float
    kv_bytes_per_s: float


class Finish(NamedTuple):
    """Nothing will follow: end when all is done."""


class Stop(NamedTuple):
    """End now; what has finished is still sent."""


Command = Assign | Adopt | Give | Finish | Stop


# -- from a worker --


class Ready(NamedTuple):
    """The model is loaded.

    Attributes:
        memory: where the device's memory goes.
        device: its name.
    """

    memory: MemoryPlan
    device: str


class Started(NamedTuple):
    """These rows are computed from the next step on: sent before it begins."""

    refs: tuple[RowRef, ...]


class Began(NamedTuple):
    """These rows of a shard are encoded from now on: sent before that begins."""

    shard_index: int
    ordinals: Ordinals


class Rows(NamedTuple):
    """Rows that have their result."""

    rows: tuple[tuple[RowRef, ResultRow], ...]


class Block(NamedTuple):
    """Rows of one shard that have their result, as columns.

    Attributes:
        shard_index: which.
        ordinals: of the rows, ascending.
        table: their computed columns (`storage.results.computed_fields`), in the same order.
    """

    shard_index: int
    ordinals: Ordinals
    table: pa.Table

    def only(self, wanted: NDArray[np.bool_]) -> Block:
        """Some of its rows."""
        return Block(self.shard_index, self.ordinals[wanted], self.table.filter(pa.array(wanted)))


class EncodeCall(NamedTuple):
    """One superbatch, or a slice of an oversize partition, as it was encoded.

    Attributes:
        shard_index: whose rows.
        started_s: clock of the worker.
        elapsed_s: in the encoder.
        interval_s: since the call before it ended: what a call costs all in all, its rows' way to
            the encoder and to the files included; of the first call as `elapsed_s`.
        num_texts: encoded.
        num_tokens: of them.
        num_batches: steps that it took.
    """

    shard_index: int
    started_s: float
    elapsed_s: float
    interval_s: float
    num_texts: int
    num_tokens: int
    num_batches: int


class Steps(NamedTuple):
    """What the engine did, and what its policy decided."""

    records: tuple[StepRecord | EventRecord | EncodeCall, ...]


class Report(NamedTuple):
    """A sign of life, with the work that is left, and what the threads have done so far."""

    load: Load
    works: tuple[Work, ...] = ()


class Given(NamedTuple):
    """Rows that are not this worker's any more.

    Attributes:
        parcels: rows whose prompt has been made, begun or not.
        unread: rows that have not been read.
    """

    parcels: tuple[Parcel, ...] = ()
    unread: tuple[Assign, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.parcels) + sum(part.num_rows for part in self.unread)


class Failed(NamedTuple):
    """The worker has ended because of this."""

    fault: BaseException


class Ended(NamedTuple):
    """The worker has ended as it was told to."""

    works: tuple[Work, ...] = ()


class Gone(NamedTuple):
    """Said by a link: the worker is not there any more, and said nothing."""

    reason: str


Event = Ready | Started | Began | Rows | Block | Steps | Report | Given | Failed | Ended | Gone
