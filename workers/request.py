"""What goes into the engine and what comes out: `Request`, `SamplingParams`, `Result`.

A `Request` is one unit of work from one input row; a `Result` answers exactly one request, good or
bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, NewType, Protocol

from schedulers.events import PolicyEvent
from workers.times import EngineTimes, ExecuteTimes

RequestId = NewType("RequestId", str)

FinishReason = Literal["stop", "length", "error"]
"""`stop`: end-of-sequence, stop id or stop string (or a complete grammar). `length`: max_tokens or
the model's length.
"""

RowErrorType = Literal[
    "null_prompt",
    "empty_prompt",
    "invalid_prompt",
    "prompt_too_long",
    "exceeds_kv_memory",
    "invalid_schema",
    "out_of_memory",
    "timeout",
    "numerical_error",
    "worker_died",
]
"""Why a row has no text, for the `error_type` column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions of a request are drawn. `temperature == 0` is greedy.

    Attributes:
        max_tokens: most tokens generated per sample (at least 1).
        min_tokens: end-of-sequence, stop ids and stop strings are not honoured before that many
            tokens.
        temperature: >= 0.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass, in (0, 1].
        min_p: drop tokens below this share of the likeliest token's probability, in [0, 1].
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens seen in
            prompt or output (CTRL).
        presence_penalty: subtracted once from the logits of tokens seen in the output.
        frequency_penalty: subtracted per occurrence in the output.
        stop: strings that end the completion; not part of its text.
        stop_token_ids: ids that end the completion, beside the model's own end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids neither end the completion nor are suppressed.
        logprobs: None: off. k: log-probability of the chosen token and of the k likeliest ones.
        n: samples per row.
        seed: the job's seed; a row's stream is a function of (seed, request id, sample index,
            position).
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 or more, and finite"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            (
                "repetition_penalty",
                0.0 < self.repetition_penalty < float("inf"),
                "above 0, and finite",
            ),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("stop", all(self.stop), "without empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("n", 1 <= self.n <= 64, "between 1 and 64"),
        )
        for name, holds, want in checks:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {want}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Matcher(Protocol):
    """State of one sample inside a compiled grammar (structured output). Owned by its sequence."""

    def fill_mask(self, mask: object, row: int) -> None:
        """Write the allowed tokens into row `row` of an int32 bitmask tensor of shape (batch,
        ceil(vocab / 32)).
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token."""
        ...

    @property
    def terminated(self) -> bool:
        """True when the grammar is complete and an end-of-sequence token has been accepted or is
        all that may follow.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all rows that use it."""

    def matcher(self) -> Matcher: ...


class TokenLogprob(NamedTuple):
    """Log-probability (natural, of the raw model distribution before penalties, temperature and
    filters) of one token.
    """

    token_id: int
    logprob: float


class Sampled(NamedTuple):
    """A token drawn for one sequence in one step.

    `error` is set, and the token meaningless, when the logits were not finite.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    error: str | None = None


class KVState(NamedTuple):
    """Keys and values of a sequence's first tokens, on their way between two engines of one model.

    Attributes:
        num_tokens: that they cover.
        blocks: as `Backend.read_kv` gave them.
    """

    num_tokens: int
    blocks: Any


class Resume(NamedTuple):
    """How far another engine has come with a request of one sample.

    Attributes:
        output_token_ids: generated so far.
        logprobs: one entry a generated token, when asked for.
        kv: spares the receiver to compute the tokens again; None: it has to.
        num_suspensions: so far.
    """

    output_token_ids: tuple[int, ...]
    logprobs: tuple[Sampled, ...] = ()
    kv: KVState | None = None
    num_suspensions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One unit of work.

    Attributes:
        request_id: the row's identity, unique within a job; also the key of its random stream.
        prompt_token_ids: at least one token.
        sampling: how completions are drawn.
        grammar: constrains the output, if any.
        resume: another engine has begun it.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    grammar: Grammar | None = None
    resume: Resume | None = None

    def __post_init__(self) -> None:
        if self.resume is not None and self.sampling.n > 1:
            raise ValueError(
                f"request {self.request_id!r} has {self.sampling.n} samples; only one can be "
                "resumed, several begin anew"
            )


class RowError(NamedTuple):
    """Why a row has no completion."""

    type: RowErrorType
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample of a row.

    Attributes:
        token_ids: generated ids, the one that ended it included.
        finish_reason: why it ended.
        stop_string: the stop string that ended it, if one did.
        logprobs: one entry a generated token, when asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    logprobs: tuple[Sampled, ...] = ()

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities; None when they were not asked for."""
        if not self.logprobs:
            return None
        return sum(item.logprob or 0.0 for item in self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one request: `sampling.n` completions, or an error.

    Attributes:
        num_cached_tokens: prompt tokens of the first sample that a shared prefix brought.
        num_suspensions: how often its sequences gave up their KV blocks.
        queue_s: from arrival in the engine to first admission.
        run_s: from first admission to the end.
    """

    request_id: RequestId
    completions: tuple[Completion, ...] = ()
    error: RowError | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_suspensions: int = 0
    queue_s: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step, for the telemetry table `steps`."""

    step: int
    started_s: float
    elapsed_s: float
    phase: str
    reason: str
    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    num_seqs: int
    num_running: int
    num_waiting: int
    num_admitted: int
    num_suspended: int
    num_finished: int
    num_free_blocks: int
    num_blocks: int
    schedule_s: float = field(default=0.0)
    """Seconds spent in plan, apply, resume and accounting, outside the backend."""
    policy_mode: str = ""
    """What the policy was doing: "exclusive" or "mixed"."""
    engine: EngineTimes = field(default_factory=EngineTimes)
    """Parts of `schedule_s`, and what came before the step."""
    execute: ExecuteTimes = field(default_factory=ExecuteTimes)
    """Parts of `elapsed_s`."""

    def row(self) -> dict[str, Any]:
        """The record by columns; those of the parts are beside the others."""
        columns = asdict(self)
        del columns["engine"], columns["execute"]
        return {**columns, **self.engine._asdict(), **self.execute._asdict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """A decision of the policy, for the telemetry table that its class names.

    Attributes:
        step: the step whose plan it led to.
        at_s: engine clock when that step was planned.
    """

    step: int
    at_s: float
    event: PolicyEvent
