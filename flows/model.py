"""The model of a job: found and fingerprinted early, loaded late.

`open_model` reads only small files, so a wrong model name fails before anything heavy is imported;
torch is imported when `load_backend` is called. Tests and benchmarks pass another `Model` to the
runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from workers.sequence import FindStop

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flows.spec import JobSpec
    from workers.backends.base import Backend
    from workers.encoding import EncodeBackend, PackedTexts
    from workers.loading.folder import ModelFiles


class Tokenizer(Protocol):
    """What a run needs of a tokenizer; `workers.loading.tokenizer.Tokenizer` is the real one."""

    @property
    def has_chat_template(self) -> bool: ...
    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]: ...
    def truncate(
        self, texts: PackedTexts, max_len: int, *, side: str | None = None
    ) -> tuple[PackedTexts, NDArray[np.bool_]]: ...
    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...
    def text(self, ids: Sequence[int], *, stop_string: str | None = None) -> str: ...
    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...
    def find_stop(self, stops: tuple[str, ...]) -> FindStop: ...


class Vectors(NamedTuple):
    """What a model gives for a text, for the tasks embed, classify and score.

    Attributes:
        width: numbers of a row: dimensions, labels, or 1.
        labels: of classify, in the order of the numbers.
    """

    width: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is known but not loaded.

    Attributes:
        fingerprint: of its content; part of the job's identity.
        generation_config: the model's own sampling defaults.
        load_tokenizer: cheap.
        load_backend: imports torch and loads the weights, for the task generate.
        load_encoder: the same for the other tasks.
        vectors: of these, what a row gets.
        text_prefix: a prompt of the model's own, put before each text that is embedded.
        pools_prefix: its tokens count in the embedding.
    """

    fingerprint: str
    generation_config: Mapping[str, object]
    load_tokenizer: Callable[[], Tokenizer]
    load_backend: Callable[[], Backend]
    load_encoder: Callable[[], EncodeBackend] | None = None
    vectors: Vectors | None = None
    text_prefix: str = ""
    pools_prefix: bool = True


def open_model(spec: JobSpec) -> Model:
    """Find the job's model.

    Raises:
        ModelError: missing, unreachable, damaged or unsupported.
    """
    from workers.loading.files import resolve_model

    files = resolve_model(spec.model, revision=spec.revision)

    def load_tokenizer() -> Tokenizer:
        from workers.loading.tokenizer import Tokenizer as RealTokenizer

        return RealTokenizer.load(files)

    def load_backend() -> Backend:
        from workers.backends.torch_backend import TorchBackend

        return TorchBackend.load(
            files,
            device=spec.engine.device,
            dtype=spec.engine.dtype,
            deterministic=spec.engine.deterministic,
        )

    model = Model(
        fingerprint=files.fingerprint,
        generation_config=files.generation_config,
        load_tokenizer=load_tokenizer,
        load_backend=load_backend,
    )
    return model if spec.task == "generate" else _of_vectors(model, files, spec)


def _of_vectors(model: Model, files: ModelFiles, spec: JobSpec) -> Model:
    """The same for a task that gives numbers for a text."""
    from flows.encoders import describe_vectors, load_encoder, sentence_config

    model = replace(
        model,
        vectors=describe_vectors(files, spec),
        load_encoder=load_encoder(files, spec),
    )
    if spec.task != "embed":
        return model
    sentence = sentence_config(files, spec)

    def load_tokenizer() -> Tokenizer:
        from workers.loading.tokenizer import Tokenizer as RealTokenizer

        return RealTokenizer.load(files, lower_case=sentence.lower_case)

    return replace(
        model,
        load_tokenizer=load_tokenizer,
        text_prefix=sentence.prompt(),
        pools_prefix=sentence.include_prompt,
    )
