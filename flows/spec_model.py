"""The job spec: one model is the CLI's options, the job file, the Prefect form and the record.

Nested one level at most; the CLI shows the same fields flat, under the names given as `cli`. What a
single field may be is in its `Field`; what fields may not be together is in `_contradictions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from flows.credentials import check_slug, needs_credentials

Task = Literal["generate", "embed", "classify", "score"]
OnTooLong = Literal["error", "truncate_left", "truncate_right", "fail"]
PolicyName = Literal["hybrid", "exclusive", "mixed"]
SizingName = Literal["moments", "paper", "paper_sigma"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Device = Literal["auto", "cpu", "cuda", "mps"]
PoolingName = Literal["mean", "cls", "max", "last"]
VectorDtype = Literal["float32", "float16"]

DEFAULT_MODELS: dict[Task, str] = {"embed": "minilm"}
"""By task; else `smollm2`."""

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)", re.IGNORECASE)
_MULTIPLES = {"K": 1, "M": 2, "G": 3, "T": 4}
Column = Annotated[str, Field(min_length=1)]
NonEmpty = Annotated[str, Field(min_length=1)]


def _field(
    default: Any,
    position: int,
    title: str,
    description: str,
    *,
    cli: str | None = None,
    **bounds: Any,
) -> Any:
    """A described field; `cli` is its option where that is not the field's name."""
    extra: dict[str, Any] = {"position": position}
    if cli is not None:
        extra["cli"] = cli
    return Field(
        default=default,
        title=title,
        description=description,
        json_schema_extra=extra,
        **bounds,
    )


class _Spec(BaseModel):
    """What all parts of a spec share: unknown keys are refused, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PromptSpec(_Spec):
    """Where prompts come from: exactly one of `template`, `column` and `messages_column`."""

    template: NonEmpty | None = _field(
        None, 0, "Template", "Jinja2 template over the row's columns: '{{ column }}'.",
        cli="--prompt",
    )  # fmt: skip
    column: Column | None = _field(
        None, 1, "Prompt column", "Column that holds the whole prompt.", cli="--prompt-column"
    )
    messages_column: Column | None = _field(
        None, 2, "Messages column",
        "Column of chat messages: a list of {role, content}, or the same as JSON text.",
        cli="--messages-column",
    )  # fmt: skip
    system: NonEmpty | None = _field(
        None, 3, "System message", "System message put before each row's own.", cli="--system"
    )
    raw: bool = _field(
        False, 4, "Raw prompt", "Give the model the bare text, without its chat template.",
        cli="--raw-prompt",
    )  # fmt: skip


class SamplingSpec(_Spec):
    """How completions are drawn. None: as the model's generation_config says, else greedy."""

    max_tokens: int = _field(256, 0, "Max tokens", "Most tokens generated per sample.", ge=1)
    min_tokens: int = _field(
        0, 1, "Min tokens", "No end of the completion is honoured before that many tokens.", ge=0
    )
    temperature: float | None = _field(
        None, 2, "Temperature", "0 is greedy; by default as the model says, else 0.", ge=0.0
    )
    top_k: int | None = _field(None, 3, "Top k", "Keep the k likeliest tokens; 0: all.", ge=0)
    top_p: float | None = _field(
        None, 4, "Top p", "Keep the likeliest tokens that have this mass.", gt=0.0, le=1.0
    )
    min_p: float | None = _field(
        None, 5, "Min p", "Drop tokens below this share of the likeliest one.", ge=0.0, le=1.0
    )
    repetition_penalty: float | None = _field(
        None, 6, "Repetition penalty", "Above 1: less of what prompt and output have.", gt=0.0
    )
    presence_penalty: float = _field(
        0.0, 7, "Presence penalty", "Taken once off tokens seen in the output.", ge=-2.0, le=2.0
    )
    frequency_penalty: float = _field(
        0.0, 8, "Frequency penalty", "Taken per occurrence in the output.", ge=-2.0, le=2.0
    )
    stop: tuple[NonEmpty, ...] = _field(
        (), 9, "Stop strings", "Strings that end a completion; repeat the option for several."
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = _field(
        (), 10, "Stop token ids", "Ids that end a completion, beside the model's own.",
        cli="--stop-token-id",
    )  # fmt: skip
    ignore_eos: bool = _field(
        False, 11, "Ignore end of sequence", "Go on after the model's end of sequence."
    )
    logprobs: int | None = _field(
        None, 12, "Log-probabilities",
        "Keep each token's log-probability and those of the k likeliest ones.", ge=0, le=20,
    )  # fmt: skip
    n: int = _field(1, 13, "Samples", "Samples per row.", ge=1, le=64)
    seed: int = _field(
        0, 14, "Seed", "A row's random stream is a function of this and of the row's id.",
        ge=0, lt=2**63,
    )  # fmt: skip


class EngineSpec(_Spec):
    """How the work is done. Only `dtype` and `deterministic` may change results."""

    policy: PolicyName = _field(
        "hybrid",
        0,
        "Policy",
        "Prefill and decode apart (exclusive), together (mixed), or whichever is cheaper (hybrid).",
    )
    dtype: Dtype = _field(
        "auto",
        1,
        "Data type",
        "Of weights and KV memory; auto: by hardware. int8: faster on CPUs, slightly less exact.",
    )
    device: Device = _field("auto", 2, "Device", "Where the model runs.")
    memory: str | None = _field(
        None, 3, "Memory", "Limit for weights, KV and activations: '4GiB', or '50%' of all."
    )
    max_batch_tokens: int | None = _field(
        None, 4, "Max batch tokens", "Most tokens computed in one step; by default by memory.", ge=1
    )
    max_seqs: int | None = _field(
        None, 5, "Max sequences", "Most sequences in flight; by default by memory.", ge=1
    )
    deterministic: bool = _field(
        False, 6, "Deterministic",
        "A row's result does not depend on what else is in its batch; slower.",
    )  # fmt: skip
    overflow_probability: float = _field(
        0.01, 7, "Overflow probability",
        "Bound on the chance that the sequences in flight outgrow KV memory; they wait then.",
        gt=0.0, lt=1.0,
    )  # fmt: skip
    sizing: SizingName = _field(
        "moments", 8, "Sizing",
        "How many sequences memory is safe for: by measured moments, or a form of the paper's.",
    )  # fmt: skip

    workers: int | None = _field(
        None, 9, "Workers",
        "Worker processes, each with its own engine; by default one a GPU, or only this process.",
        ge=1, le=1024,
    )  # fmt: skip
    cluster: NonEmpty | None = _field(
        None, 10, "Cluster",
        "Workers as Ray actors: 'auto', ray://HOST:PORT, or 'local', which starts a cluster.",
    )  # fmt: skip

    start_timeout_s: float = _field(
        600.0, 11, "Start timeout",
        "Seconds in which a worker process has to load its model; else it is started again.",
        gt=0.0,
    )  # fmt: skip

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = _MEMORY.fullmatch(value.strip())
        if match is None:
            raise ValueError("give a size such as 4GiB, 800MB, or a share of all such as 50%")
        number = float(match[1])
        if number <= 0 or (match[2] == "%" and number > 100):
            raise ValueError("it must be above 0, and a share at most 100%")
        return value.strip()

    def memory_bytes(self, total_bytes: int) -> int | None:
        """The limit in bytes, of a device with `total_bytes`; None when no limit is given."""
        match = _MEMORY.fullmatch(self.memory) if self.memory is not None else None
        if match is None:
            return None
        number, unit = float(match[1]), match[2].upper()
        if unit == "%":
            return int(total_bytes * number / 100)
        return int(number * (1024 if "I" in unit else 1000) ** _MULTIPLES[unit[0]])


class EncodeSpec(_Spec):
    """Of the tasks that give numbers for a text: embed, classify and score."""

    vector_dtype: VectorDtype = _field(
        "float32", 0, "Vector data type", "In which embeddings are written."
    )
    normalize: bool | None = _field(
        None, 1, "Normalize", "Embeddings of length 1; by default as the model says."
    )
    pooling: PoolingName | None = _field(
        None, 2, "Pooling", "How tokens become one embedding; by default as the model says."
    )
    prompt_name: NonEmpty | None = _field(
        None, 3, "Prompt name",
        "Which of the model's own prompts is put before each text; by default its default one.",
    )  # fmt: skip
    choices: tuple[NonEmpty, ...] = _field(
        (), 4, "Choices",
        "Labels that a language model chooses from, by their likelihood behind the prompt; "
        "repeat the option. Without them the model's own classification head is used.",
        cli="--choice",
    )  # fmt: skip
    min_texts: int | None = _field(
        None, 5, "Superbatch minimum",
        "Partitions are encoded together until there are that many texts; by default by cost.",
        cli="--superbatch-min", ge=1,
    )  # fmt: skip
    max_texts: int | None = _field(
        None, 6, "Superbatch maximum",
        "Most texts encoded in one call, and in memory; by default by memory.",
        cli="--superbatch-max", ge=1,
    )  # fmt: skip


class JobSpec(_Spec):
    """A job: a model over every row of a dataset.

    Example:
        >>> JobSpec(input="reviews.parquet", prompt="Summarise: {{ text }}").output
        'out/reviews'
    """

    input: NonEmpty = _field(
        ..., 0, "Input", "Parquet file, glob, directory or fsspec URL.", cli="PATH"
    )
    prompt: PromptSpec = Field(
        default_factory=PromptSpec,
        title="Prompt",
        description="Where prompts come from; a bare string is a template.",
        json_schema_extra={"position": 1},
    )
    task: Task = _field(
        "generate", 2, "Task",
        "What the model does with a row: generate text, embed it, classify it, or score it (its "
        "log-likelihood).",
    )  # fmt: skip
    model: str = _field(
        "", 3, "Model",
        "Hugging Face folder, hub id, GGUF file, smollm2 or minilm (both embedded); by default "
        "minilm to embed, else smollm2.",
        validate_default=True,
    )  # fmt: skip
    revision: NonEmpty | None = _field(None, 4, "Revision", "Branch, tag or commit of a hub model.")
    output: str = _field(
        "", 5, "Output", "Directory or fsspec URL; by default ./out/<name of the input>.",
        validate_default=True,
    )  # fmt: skip
    id_column: Column | None = _field(
        None, 6, "Id column", "Column of unique row ids; by default FILE:ROW."
    )
    keep_columns: tuple[Column, ...] = _field(
        (), 7, "Keep columns", "Input columns to repeat in the results (a,b or repeated)."
    )
    limit: int | None = _field(None, 8, "Limit", "Only the first rows.", ge=1)
    sampling: SamplingSpec = Field(
        default_factory=SamplingSpec,
        title="Sampling",
        description="How completions are drawn.",
        json_schema_extra={"position": 9},
    )
    output_schema: dict[str, Any] | NonEmpty | None = _field(
        None, 10, "Output schema", "JSON schema of the answers: a file, or inline JSON."
    )
    guided: bool = _field(True, 11, "Guided", "With a schema: only tokens that meet it are drawn.")
    on_too_long: OnTooLong | None = _field(
        None, 12, "On too long",
        "A text that the model cannot take whole, or a prompt without room for an answer: an error "
        "row, cut on a side, or the job fails; by default cut on the right to embed, else an error "
        "row.",
        validate_default=True,
    )  # fmt: skip
    engine: EngineSpec = Field(
        default_factory=EngineSpec,
        title="Engine",
        description="How the work is done.",
        json_schema_extra={"position": 13},
    )
    shard_tokens: int = _field(
        250_000, 14, "Shard tokens", "Estimated tokens of a shard, the unit of a commit.", ge=1
    )
    checkpoint_s: float = _field(
        5.0, 15, "Checkpoint seconds", "Finished rows are made durable that often.",
        ge=0.1, le=3600.0,
    )  # fmt: skip
    row_timeout_s: float | None = _field(
        None, 16, "Row timeout", "Seconds after which a row in the engine becomes an error.", gt=0.0
    )
    max_error_rate: float = _field(
        0.05, 17, "Max error rate", "Share of bad rows up to which the job is a success.",
        ge=0.0, le=1.0,
    )  # fmt: skip
    retry_errors: bool = _field(
        False, 18, "Retry errors", "Compute the error rows of an earlier run again."
    )
    overwrite: bool = _field(
        False, 19, "Overwrite", "Delete the results of an earlier job in OUTPUT first."
    )

    credentials: NonEmpty | None = _field(
        None, 20, "Credentials",
        "Prefect block for s3:// URLs, such as aws-credentials/prod; by default the AWS chain.",
    )  # fmt: skip
    partition_by: tuple[Column, ...] = _field(
        (), 21, "Partition by",
        "Columns whose values part the output: one file for each, in folders COLUMN=VALUE (a,b or "
        "repeated).",
    )  # fmt: skip
    encode: EncodeSpec = Field(
        default_factory=EncodeSpec,
        title="Encode",
        description="Of the tasks embed, classify and score.",
        json_schema_extra={"position": 22},
    )

    @field_validator("credentials")
    @classmethod
    def _check_credentials(cls, value: str | None) -> str | None:
        if value is not None:
            check_slug(value)
        return value

    @field_validator("prompt", mode="before")
    @classmethod
    def _template_of(cls, value: Any) -> Any:
        return {"template": value} if isinstance(value, str) else value

    @field_validator("model")
    @classmethod
    def _derive_model(cls, value: str, info: ValidationInfo) -> str:
        return value or DEFAULT_MODELS.get(info.data.get("task", "generate"), "smollm2")

    @field_validator("on_too_long")
    @classmethod
    def _derive_on_too_long(cls, value: OnTooLong | None, info: ValidationInfo) -> OnTooLong:
        return value or ("truncate_right" if info.data.get("task") == "embed" else "error")

    @field_validator("output")
    @classmethod
    def _derive_output(cls, value: str, info: ValidationInfo) -> str:
        return value or f"out/{input_stem(str(info.data.get('input', '')))}"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        found = next(_contradictions(self), None)
        if found is not None:
            raise ValueError(found)
        return self


def input_stem(path: str) -> str:
    """A name for what a path, glob or URL points at."""
    for part in reversed(path.rsplit("://", maxsplit=1)[-1].split("/")):
        if part in ("", ".", "..") or re.search(r"[*?\[\]]", part):
            continue
        return part.removesuffix(".parquet") or part
    return "job"


def _contradictions(spec: JobSpec) -> Iterator[str]:
    """What fields say against each other, each with the way out."""
    yield from _prompt_contradictions(spec.prompt)
    yield from _sampling_contradictions(spec.sampling)
    yield from _engine_contradictions(spec.engine)
    yield from _task_contradictions(spec)
    if spec.retry_errors and spec.overwrite:
        yield "retry_errors keeps the good rows and overwrite deletes all; give one of them"
    if len(set(spec.keep_columns)) < len(spec.keep_columns):
        yield f"keep_columns names a column twice: {', '.join(spec.keep_columns)}; name it once"
    if _same_place(spec.input, spec.output):
        yield f"output and input are both {spec.output!r}; write the results elsewhere"
    if spec.credentials is not None and not any(map(needs_credentials, (spec.input, spec.output))):
        yield "credentials are for s3:// URLs, and neither input nor output is one; leave them out"
    if spec.output_schema is not None and spec.guided:
        if spec.sampling.ignore_eos:
            yield "ignore_eos never ends what output_schema ends; leave one out, or turn guided off"
        if spec.sampling.min_tokens:
            yield "min_tokens may forbid the end that output_schema asks for; leave min_tokens out"


def _task_contradictions(spec: JobSpec) -> Iterator[str]:
    if spec.task == "generate":
        for name in _given(spec.encode, EncodeSpec.model_fields):
            yield f"encode.{name} is for the tasks embed, classify and score, not for generate"
        if spec.partition_by:
            yield "partition_by is for the tasks embed, classify and score, not for generate"
        return
    if spec.sampling != SamplingSpec():
        yield f"sampling is for the task generate; leave it out with task {spec.task}"
    if spec.output_schema is not None:
        yield f"output_schema is for the task generate; leave it out with task {spec.task}"
    yield from _encode_contradictions(spec)
    yield from _choice_contradictions(spec)


def _encode_contradictions(spec: JobSpec) -> Iterator[str]:
    encode = spec.encode
    if len(set(spec.partition_by)) < len(spec.partition_by):
        yield f"partition_by names a column twice: {', '.join(spec.partition_by)}; name it once"
    if encode.min_texts and encode.max_texts and encode.min_texts > encode.max_texts:
        yield (
            f"encode.min_texts is {encode.min_texts} and max_texts {encode.max_texts}; "
            "lower the first or raise the second"
        )
    if spec.task != "embed":
        for name in _given(encode, ("vector_dtype", "normalize", "pooling", "prompt_name")):
            yield f"encode.{name} is for the task embed, not for {spec.task}"
    if not encode.choices and (spec.prompt.messages_column or spec.prompt.system):
        yield (
            f"messages_column and system are for models that answer; the task {spec.task} takes a "
            "text: give a prompt (a template) or prompt_column"
        )


def _given(encode: EncodeSpec, names: Iterable[str]) -> list[str]:
    """Fields that are not at their default."""
    defaults = EncodeSpec.model_fields
    return [name for name in names if getattr(encode, name) != defaults[name].default]


def _choice_contradictions(spec: JobSpec) -> Iterator[str]:
    choices = spec.encode.choices
    if choices and spec.task != "classify":
        yield f"choices are for the task classify, not for {spec.task}"
    if len(choices) == 1:
        yield f"choices has only {choices[0]!r}; give at least two"
    if not all(map(str.strip, choices)):
        yield "choices has a blank one, which a model cannot write; leave it out"
    if len(set(choices)) < len(choices):
        yield f"choices names one twice: {', '.join(choices)}; name it once"
    if spec.task == "classify" and not choices and spec.model == "smollm2":
        yield (
            "smollm2 has no classification head; give choices, or a model with a head (such as "
            "BertForSequenceClassification)"
        )


def _prompt_contradictions(prompt: PromptSpec) -> Iterator[str]:
    sources = {
        "prompt (a template)": prompt.template,
        "prompt_column": prompt.column,
        "messages_column": prompt.messages_column,
    }
    given = [name for name, value in sources.items() if value is not None]
    if not given:
        yield f"a job needs a prompt; give one of {', '.join(sources)}"
    if len(given) > 1:
        yield f"{' and '.join(given)} are both given; give only one of them"
    if prompt.raw and prompt.system is not None:
        yield "raw_prompt has no place for a system message; write it into the prompt"
    if prompt.raw and prompt.messages_column is not None:
        yield "raw_prompt leaves out the chat template that messages_column needs; drop raw_prompt"


def _sampling_contradictions(sampling: SamplingSpec) -> Iterator[str]:
    if sampling.min_tokens > sampling.max_tokens:
        yield (
            f"min_tokens is {sampling.min_tokens} and max_tokens {sampling.max_tokens}; "
            "lower the first or raise the second"
        )
    if sampling.temperature != 0.0:
        return
    for name in ("top_k", "top_p", "min_p"):
        if getattr(sampling, name) is not None:
            yield f"{name} has no effect at temperature 0; leave it out or raise the temperature"
    if sampling.n > 1:
        yield f"n is {sampling.n}, but at temperature 0 all samples are the same; raise it"


def _engine_contradictions(engine: EngineSpec) -> Iterator[str]:
    if engine.device == "cpu" and engine.dtype == "float16":
        yield "float16 is not for the CPU; use bfloat16 or float32"
    seqs, tokens = engine.max_seqs, engine.max_batch_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        yield (
            f"max_seqs is {seqs}, but max_batch_tokens {tokens} lets only {tokens} sequences take "
            "a step together; raise max_batch_tokens or lower max_seqs"
        )


def _same_place(first: str, second: str) -> bool:
    return first.rstrip("/").removeprefix("./") == second.rstrip("/").removeprefix("./")
