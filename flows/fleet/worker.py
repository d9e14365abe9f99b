"""A worker: one engine and what feeds it, from rows it is told of to result rows.

    feeder   reads rows, renders prompts, tokenises ahead         (`flows.feeder`)
    engine   plan, apply, execute, resume                         (`workers.engine`)
    outlet   detokenises, and tells the coordinator               (here)
    watchdog notices a step that hangs                            (`flows.watchdog`)

It lives in the coordinator's process, in one of its own or on another machine, and knows of none of
these: it is told by `handle` and tells by `emit`. It writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flows.busy import BusyTimes
from flows.feeder import Feeder, PromptLimits, Settled
from flows.fleet.life import WorkerLife
from flows.fleet.messages import (
    Adopt,
    Assign,
    Command,
    Event,
    Finish,
    Give,
    Given,
    Parcel,
    Ready,
    Rows,
    Started,
    Steps,
    WorkerSetup,
)
from flows.fleet.part_queue import AllBut
from flows.fleet.reports import REPORT_S
from flows.model import Model
from flows.outputs import output_rules
from flows.prompts import PromptRenderer
from flows.queues import RequestQueue, RowRef, Stopped
from flows.rowmaker import Answered, RowMaker
from flows.sampling import resolve_sampling
from flows.watchdog import Step, WatchedBackend
from flows.worker_memory import worker_memory
from schedulers.cost import StepCost, StepSample
from schedulers.load import Load, OutputLengths, Part, choose_given, load_of, part_of
from schedulers.route import Way
from storage.rows import Row, RowReader
from workers.backends.base import ModelInfo
from workers.request import EventRecord, Request, RequestId, StepRecord
from workers.sequence import Sequence as Seq
from workers.setup import EngineOptions, make_engine

READY_REQUESTS = 512
"""Requests kept tokenised ahead of the engine."""

ROWS_A_MESSAGE = 64
"""Rows told at a time, at most: queues are bounded by messages, and so by rows."""

Item = Answered | Settled | StepRecord | EventRecord


class Worker(WorkerLife[Item]):
    """Runs rows through one engine. `load`, then `run`; `handle` from any thread."""

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
        self._requests = RequestQueue(READY_REQUESTS)
        self._in_flight: dict[str, RowRef] = {}
        self._load = Load()
        self._busy_s, self._num_tokens = 0.0, 0
        self._measured_s = clock()

    # -- start --

    def load(self) -> Ready:
        """Load the model and make the engine.

        Raises:
            ModelError, NotEnoughMemory, ValueError: the user's to mend.
        """
        spec, busy = self._spec, self._busy
        model = self._model or self._setup.open_model(spec)
        tokenizer = model.load_tokenizer()
        self._renderer = PromptRenderer(spec, self._setup.dataset.schema).bind(tokenizer)
        self._sampling = resolve_sampling(spec.sampling, model.generation_config)
        busy.mark("opening the job")
        backend = WatchedBackend(model.load_backend(), clock=self._clock)
        busy.mark("loading the model")
        rules = output_rules(spec, tokenizer, vocab_size=backend.info.vocab_size)
        self._grammar = rules.grammar
        made = make_engine(
            backend,
            self._engine_options(backend.info.device),
            clock=self._clock,
            calibration=self._calibration(model, backend.info),
            find_stop=tokenizer.find_stop,
            on_step=self._on_step,
            on_event=lambda event: self._outbox.put([event]),
            on_start=self._on_start if self._setup.reports else lambda _: None,
        )
        self._engine, self._estimator = made.engine, made.estimator
        self._outlet_meter = busy.meter("outlet")
        self._to_rows = RowMaker(tokenizer, check_output=rules.check)
        self._reader = RowReader(self._setup.dataset, self._renderer.columns)
        self._feeder = Feeder(
            read=self._read,
            renderer=self._renderer,
            encoder=tokenizer,
            limits=PromptLimits(
                max_model_len=backend.info.max_model_len,
                max_tokens=self._sampling.max_tokens,
                on_too_long=spec.on_too_long or "error",
            ),
            sampling=self._sampling,
            requests=self._requests,
            outbox=self._outbox,
            in_flight=self._in_flight,
            grammar=rules.grammar,
            meter=busy.meter("feeder"),
        )
        self._watch_over(backend)
        return Ready(made.memory, backend.info.device)

    def _engine_options(self, device: str) -> EngineOptions:
        engine = self._spec.engine
        memory = worker_memory(engine, device, self._setup.num_workers)
        return EngineOptions(
            policy=engine.policy,
            overflow_probability=engine.overflow_probability,
            sizing=engine.sizing,
            memory_bytes=memory.limit_bytes,
            max_batch_tokens=engine.max_batch_tokens,
            max_seqs=engine.max_seqs,
            deterministic=engine.deterministic,
            row_timeout_s=self._spec.row_timeout_s,
            host_share=memory.host_share,
        )

    def _calibration(self, model: Model, info: ModelInfo) -> tuple[StepSample, ...]:
        """Steps of `flows calibrate`, when it has been run here with this model."""
        from flows.calibration import hardware_of, load_calibration

        found = load_calibration(
            hardware=hardware_of(info.device), model_fingerprint=model.fingerprint, dtype=info.dtype
        )
        return () if found is None else found.prior_samples

    # -- the whole life --

    def _feed(self) -> None:
        self._feeder.run()

    def _let_go(self) -> None:
        self._requests.stop()
        self._feeder.close()
        self._engine.stop()

    def _read(self, part: Assign) -> Iterator[list[Row]]:
        return self._reader.rows(part.shard, skip=AllBut(part.ordinals))

    def _drive(self) -> None:
        """Run the engine until the feeder has closed the queue and every request is answered."""
        try:
            for result in self._engine.run(self._requests):
                ref = self._in_flight.pop(result.request_id)
                self._outbox.put([Answered(ref, result)])
        except Stopped:
            return
        finally:
            self._engine.backend.close()

    def _hung(self, step: Step) -> str:
        return (
            f"{step.num_tokens} tokens of {step.num_seqs} sequences; "
            f"{self._engine.num_in_flight} rows in flight"
        )

    # -- what it is told --

    def handle(self, command: Command) -> None:
        """Do what the coordinator says. Returns at once."""
        if isinstance(command, Assign):
            self._count(command.num_rows)
            self._feeder.submit(command)
        elif isinstance(command, Adopt):
            self._adopt(command.parcels)
        elif isinstance(command, Give):
            self._engine.call(lambda: self._give(command))
            self._requests.wake()
        elif isinstance(command, Finish):
            self._feeder.close()
        else:
            self._interrupt()

    def _adopt(self, parcels: Sequence[Parcel]) -> None:
        self._count(len(parcels))
        for parcel in parcels:
            self._in_flight[parcel.ref.row_id] = parcel.ref
        self._requests.put_first(
            [
                Request(
                    request_id=RequestId(parcel.ref.row_id),
                    prompt_token_ids=parcel.prompt_token_ids,
                    sampling=self._sampling,
                    grammar=self._grammar,
                    resume=parcel.resume,
                )
                for parcel in parcels
            ]
        )

    def _give(self, wanted: Give) -> None:
        """Give work away: what is read last first, then what waits, then what runs. In the engine's
        thread.
        """
        pool = self._pool()
        mean_s = pool.mean_s
        left_s = wanted.share_s
        unread: list[Assign] = []
        requests: list[Request] = []
        if mean_s > 0:
            unread = self._feeder.take_back(int(left_s / mean_s))
            left_s -= mean_s * sum(part.num_rows for part in unread)
            requests = self._requests.take_back(max(0, int(left_s / mean_s)))
            left_s -= mean_s * len(requests)
        requests += self._take_out(pool, left_s, wanted.kv_bytes_per_s)
        parcels = tuple(
            Parcel(
                self._in_flight.pop(request.request_id),
                tuple(request.prompt_token_ids),
                request.resume,
            )
            for request in requests
        )
        given = Given(parcels, tuple(unread))
        self._count(-given.num_rows)
        self._emit(given)

    def _take_out(self, pool: _Pool, share_s: float, kv_bytes_per_s: float) -> list[Request]:
        """Sequences of the engine: of those that wait, and where they are not enough, of all."""
        way = Way(pool.cost.beta_p, self._engine.backend.info.kv_bytes_per_token, kv_bytes_per_s)
        seqs, parts = pool.seqs, pool.parts
        if self._spec.engine.deterministic:
            # What runs stays: its numbers would differ when its tokens are computed in chunks.
            fresh = [index for index, seq in enumerate(seqs) if seq.started_s is None]
            seqs, parts = [seqs[i] for i in fresh], [parts[i] for i in fresh]
        chosen = choose_given(
            parts,
            [seq.started_s is None for seq in seqs],
            share_s,
            move_s=[way.move_s(seq.num_computed_tokens) for seq in seqs],
        )
        ids = [seqs[index].request.request_id for index in chosen]
        return self._engine.take_out(ids, with_kv=lambda _: way.carries_kv)

    # -- what it tells --

    def _on_start(self, request_ids: list[RequestId]) -> None:
        self._emit(Started(tuple(self._in_flight[request_id] for request_id in request_ids)))

    def _on_step(self, step: StepRecord) -> None:
        self._outbox.put([step])
        self._busy_s += step.elapsed_s
        self._num_tokens += step.num_prefill_tokens + step.num_decode_tokens
        if self._setup.reports and self._clock() >= self._measured_s + REPORT_S:
            self._measured_s = self._clock()
            self._load = self._pool().load(self._num_rows)

    def _pool(self) -> _Pool:
        """The engine's open rows and what they will cost. In the engine's thread."""
        cost = self._estimator.cost or self._flat_cost()
        lengths = OutputLengths(item.num_output_tokens for item in self._estimator.lengths.items)
        seqs = self._engine.open_sequences()
        return _Pool(seqs, [part_of(seq, lengths, cost) for seq in seqs], cost)

    def _flat_cost(self) -> StepCost:
        """Until prefill and decode have both been measured: a token is a token."""
        token_s = self._busy_s / max(1, self._num_tokens)
        return StepCost(
            alpha_p=0.0, beta_p=token_s, alpha_d=0.0, beta_d=token_s, alpha_mb=0.0, mix_a=token_s
        )

    def _send(self, items: Sequence[Item]) -> None:
        records: list[StepRecord | EventRecord] = []
        rows: list[Answered | Settled] = []
        for item in items:
            if isinstance(item, StepRecord | EventRecord):
                records.append(item)
            else:
                rows.append(item)
        if rows:
            with self._outlet_meter("detokenising"):
                made = self._to_rows(rows)
            for start in range(0, len(made), ROWS_A_MESSAGE):
                message = Rows(tuple(made[start : start + ROWS_A_MESSAGE]))
                self._count(-len(message.rows))
                self._emit(message)
        if records:
            self._emit(Steps(tuple(records)))

    def _load_now(self) -> Load:
        load = self._load if self._num_rows else Load()
        return load._replace(num_rows=self._num_rows)


class _Pool(NamedTuple):
    """The engine's open rows, and what each will cost."""

    seqs: list[Seq]
    parts: list[Part]
    cost: StepCost

    @property
    def mean_s(self) -> float:
        """Seconds of work of a row that has not started."""
        fresh = [
            part.work_s
            for seq, part in zip(self.seqs, self.parts, strict=True)
            if seq.started_s is None
        ] or [part.work_s for part in self.parts]
        return sum(fresh) / len(fresh) if fresh else 0.0

    def load(self, num_rows: int) -> Load:
        """With the rows that have not come to the engine yet."""
        known = load_of(self.parts, self.cost)
        outside = max(0, num_rows - len(self.parts))
        return Load(num_rows, known.serial_s, known.work_s + outside * self.mean_s)
