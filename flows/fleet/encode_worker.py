"""A worker of the tasks embed, classify and score: one encoder and what feeds it.

    feeder   reads and tokenises the rows of the next superbatch     (`flows.texts`)
    engine   encodes a superbatch, and tells its rows as one block   (`workers.encoding`)
    outlet   tells of steps, and that it is alive
    watchdog notices a step that hangs                               (`flows.watchdog`)

To the coordinator it is as any other worker. What it is assigned at once is encoded in one call, or
in slices where it is more than `max_texts`: so a shard that is a superbatch is one call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flows.busy import BusyTimes
from flows.fleet.life import WorkerLife
from flows.fleet.messages import (
    Adopt,
    Assign,
    Began,
    Block,
    Command,
    EncodeCall,
    Event,
    Finish,
    Give,
    Given,
    Ready,
    Steps,
    WorkerSetup,
)
from flows.fleet.part_queue import AllBut, PartQueue
from flows.model import Model
from flows.prompts import PromptRenderer
from flows.queues import Outbox, Stopped
from flows.superbatches import encode_memory
from flows.texts import TextMaker, Texts
from flows.vectors import block_table, vector_spec
from flows.watchdog import Step, WatchedEncoder
from schedulers.load import Load
from schedulers.superbatch import slices
from storage.rows import RowReader
from workers.encoding import Encoded, Encoder, EncodeStep
from workers.errors import InternalError
from workers.request import StepRecord

READ_ROWS = 1024
"""Rows that are rendered and tokenised at a time."""


class _Pace(NamedTuple):
    """What has been encoded so far."""

    num_rows: int = 0
    elapsed_s: float = 0.0

    @property
    def row_s(self) -> float:
        return self.elapsed_s / self.num_rows if self.num_rows else 0.0


class EncodeWorker(WorkerLife[StepRecord | EncodeCall]):
    """Runs rows through one encoder. `load`, then `run`; `handle` from any thread."""

    OUTBOX_ITEMS = 4096
    STEP = "a micro-batch"

    def __init__(
        self,
        setup: WorkerSetup,
        emit: Callable[[Event], None],
        *,
        model: Model | None = None,
        clock: Callable[[], float] = time.monotonic,
        busy: BusyTimes | None = None,
    ) -> None:
        super().__init__(setup, emit, model=model, clock=clock, busy=busy)
        self._parts = PartQueue()
        self._prepared: Outbox[Texts | None] = Outbox(1)
        self._room = threading.Semaphore(1)  # one superbatch is tokenised ahead of the encoder
        self._pace = _Pace()
        self._num_steps = 0
        self._ended_s: float | None = None

    # -- start --

    def load(self) -> Ready:
        """Load the model.

        Raises:
            ModelError, NotEnoughMemory, SpecError: the user's to mend.
        """
        spec, busy = self._spec, self._busy
        model = self._model or self._setup.open_model(spec)
        if model.load_encoder is None:
            raise InternalError(f"the model cannot be used for the task {spec.task}")
        tokenizer = model.load_tokenizer()
        renderer = PromptRenderer(spec, self._setup.dataset.schema).bind(tokenizer)
        busy.mark("opening the job")
        backend = WatchedEncoder(model.load_encoder(), clock=self._clock)
        busy.mark("loading the model")
        memory = encode_memory(spec, backend.info, num_workers=self._setup.num_workers)
        self._backend = backend
        assert model.vectors is not None
        self._kind = vector_spec(spec, model.vectors)
        self._max_texts = self._setup.max_texts
        self._encoder = Encoder(
            backend,
            max_batch_tokens=memory.max_batch_tokens,
            clock=self._clock,
            on_step=self._on_step,
            should_stop=lambda: self._stopping,
        )
        reader = RowReader(self._setup.dataset, renderer.columns, batch_rows=READ_ROWS)
        self._make_texts = TextMaker(
            spec=spec,
            read=lambda part: reader.rows(part.shard, skip=AllBut(part.ordinals)),
            renderer=renderer,
            tokenizer=tokenizer,
            model=model,
            max_len=backend.info.max_len,
            meter=busy.meter("feeder"),
        )
        self._watch_over(backend)
        return Ready(memory, backend.info.device)

    # -- the whole life --

    def _feed(self) -> None:
        """Tokenise ahead, a superbatch or a slice at a time. A part is taken when there is room for
        it, so that until then it can be given away.
        """
        try:
            while True:
                self._wait_for_room()
                part = self._parts.take(self._first_slice)
                self._prepared.put([None if part is None else self._make_texts(part)])
                if part is None:
                    return
        except Stopped:
            return

    def _first_slice(self, num_rows: int) -> int:
        """Rows of the first slice; the rest stays unread, so that it may be given away."""
        return next(slices(num_rows, self._max_texts))[1]

    def _wait_for_room(self) -> None:
        while not self._room.acquire(timeout=0.2):
            if self._stopping:
                raise Stopped

    def _drive(self) -> None:
        """Encode what has been prepared, until the feeder has come to its end."""
        try:
            while not self._stopping:
                for texts in self._prepared.take(timeout_s=0.2):
                    self._room.release()
                    if texts is None:
                        return
                    self._encode(texts)
        finally:
            self._backend.close()

    def _encode(self, texts: Texts) -> None:
        """One encode call: its rows are told as one block."""
        index, started_s, first_step = texts.part.shard.index, self._clock(), self._num_steps
        if self._setup.reports:
            self._emit(Began(index, texts.part.ordinals))
        encoded = self._encoder.encode(texts.packed)
        ended_s = self._clock()
        before_s = started_s if self._ended_s is None else self._ended_s
        self._ended_s = ended_s
        call = EncodeCall(
            shard_index=index,
            started_s=started_s,
            elapsed_s=ended_s - started_s,
            interval_s=ended_s - before_s,
            num_texts=len(texts.packed),
            num_tokens=texts.packed.num_tokens,
            num_batches=self._num_steps - first_step,
        )
        self._outbox.put([call])
        self._tell_block(texts, encoded)
        self._pace = _Pace(
            self._pace.num_rows + texts.part.num_rows, self._pace.elapsed_s + call.elapsed_s
        )

    def _tell_block(self, texts: Texts, encoded: Encoded) -> None:
        block = Block(
            texts.part.shard.index,
            texts.part.ordinals,
            block_table(self._kind, texts, encoded),
        )
        done = texts.rows_done(encoded.done)
        if not done.all():  # the worker was told to stop
            block = block.only(done)
        self._count(-len(block.ordinals))
        if len(block.ordinals):
            self._emit(block)

    def _on_step(self, step: EncodeStep) -> None:
        self._num_steps += 1
        self._outbox.put([_step_record(self._num_steps, step)])

    def _let_go(self) -> None:
        self._parts.drop()
        self._prepared.stop()

    def _hung(self, step: Step) -> str:
        return f"{step.num_tokens} tokens of {step.num_seqs} texts"

    # -- what it is told --

    def handle(self, command: Command) -> None:
        """Do what the coordinator says. Returns at once."""
        if isinstance(command, Assign):
            self._count(command.num_rows)
            self._parts.submit(command)
        elif isinstance(command, Adopt):
            raise InternalError("rows of an encoding job travel unread, never as parcels")
        elif isinstance(command, Give):
            self._give(command)
        elif isinstance(command, Finish):
            self._parts.close()
        else:
            self._interrupt()

    def _give(self, wanted: Give) -> None:
        """Give rows away that have not been read."""
        row_s = self._pace.row_s
        num_rows = int(wanted.share_s / row_s) if row_s else 0
        given = Given(unread=tuple(self._parts.take_back(num_rows)))
        self._count(-given.num_rows)
        self._emit(given)

    # -- what it tells --

    def _send(self, items: Sequence[StepRecord | EncodeCall]) -> None:
        self._emit(Steps(tuple(items)))

    def _load_now(self) -> Load:
        num_rows = self._num_rows
        return Load(num_rows, 0.0, num_rows * self._pace.row_s)


def _step_record(number: int, step: EncodeStep) -> StepRecord:
    """A micro-batch as a step of telemetry: all of it is prefill."""
    return StepRecord(
        step=number,
        started_s=step.started_s,
        elapsed_s=step.elapsed_s,
        phase="encode",
        reason="",
        num_prefill_tokens=step.num_tokens,
        num_decode_tokens=0,
        num_context_tokens=0,
        num_seqs=step.num_texts,
        num_running=step.num_texts,
        num_waiting=0,
        num_admitted=step.num_texts,
        num_suspended=0,
        num_finished=step.num_texts,
        num_free_blocks=0,
        num_blocks=0,
    )
