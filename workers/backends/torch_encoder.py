"""The encode backend that is ours: torch on a CPU or GPU, native where that is faster.

`execute` is: the model up to its hidden states or log-likelihoods, then the task's output. All of
it runs in inference mode, on the calling thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from workers.backends.translated import translated
from workers.encoding import EncoderInfo, EncodeTask, Floats, PackedTexts
from workers.errors import InternalError, ModelError
from workers.loading.folder import ModelFiles
from workers.loading.jsonfile import read_optional_json
from workers.loading.sentence import SentenceConfig, read_sentence_config
from workers.models import native, native_encoder
from workers.models.bert import BertModel
from workers.models.causal import CausalModel, make_causal
from workers.models.decoder import DecoderModel, WeightedModel
from workers.models.device import DeviceName, DtypeName, pick_device, pick_dtype
from workers.models.encoder import EncoderModel, LoadedEncoder
from workers.models.encoders import (
    CLASSIFIER,
    EncoderFamily,
    architecture_names,
    find_decoder_family,
    find_encoder_family,
    in_files,
    is_foreign,
    names_in,
)
from workers.models.heads import (
    ClassifyOutput,
    EmbedOutput,
    LastTokenHead,
    Output,
    ScoreOutput,
    read_labels,
)
from workers.models.native_encoder import NativeEncoder
from workers.models.weights import Places, check_weights, load_weights

_log = logging.getLogger(__name__)


class TorchEncoder:
    """Texts to vectors with torch. Made by `load`; an `EncodeBackend`."""

    def __init__(self, output: Output, info: EncoderInfo, device: torch.device) -> None:
        self._output: Output | None = output
        self._info = info
        self._device = device

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        task: EncodeTask,
        device: DeviceName = "auto",
        dtype: DtypeName = "auto",
        sentence: SentenceConfig | None = None,
    ) -> TorchEncoder:
        """Load a model's weights.

        Args:
            files: the checked folder.
            task: embed takes encoders and decoders, classify sequence classifiers, score decoders.
            device: `auto` takes a GPU where there is one.
            dtype: of what is multiplied; `auto` takes bfloat16 where the hardware multiplies it,
                else float32 (CPU) or float16 (GPU). Instead of these, and of bfloat16, it is int16
                where the native encoder runs the model: as fast, and more exact.
            sentence: how embed makes a vector of a text; None: as the files say.

        Raises:
            ModelError: the architecture, the device or the number format is not supported or does
                not serve the task, or the weights do not belong to config.json.
            DeviceOutOfMemory: the device does not hold the weights.
        """
        place = pick_device(device)
        number = pick_dtype(dtype, place)
        family = find_encoder_family(files.config)
        with translated(f"loading {files.name}"):
            if family is None:
                made = _make_from_decoder(files, task, number, place, sentence)
            else:
                if dtype in ("auto", "bfloat16") and _runs_natively(files, family, place):
                    number = torch.int16
                made = _make_from_encoder(files, family, task, number, place, sentence)
        info = _describe(files, made, task, number, place)
        _log.info("%s for %s: width %d, %s on %s", info.name, task, info.width, number, place)
        return cls(made.output, info, place)

    @property
    def info(self) -> EncoderInfo:
        return self._info

    def execute(self, texts: PackedTexts) -> Floats:
        if self._output is None:
            raise InternalError("the encoder is closed")
        self._check(texts)
        with translated(f"{len(texts)} texts of {texts.num_tokens} tokens"), torch.inference_mode():
            return self._output(texts).cpu().numpy()

    def _check(self, texts: PackedTexts) -> None:
        """What models and kernels rely on."""
        info, lengths_N = self._info, texts.lengths_N
        if len(texts) and not 0 < lengths_N.min() <= lengths_N.max() <= info.max_len:
            raise InternalError(
                f"texts of {lengths_N.min()} to {lengths_N.max()} tokens came to an encoder that "
                f"takes 1 to {info.max_len}"
            )
        ids_T = texts.token_ids_T
        if len(ids_T) and not 0 <= ids_T.min() <= ids_T.max() < info.vocab_size:
            raise ModelError(
                f"the tokenizer gave token ids of {ids_T.min()} to {ids_T.max()}, but the model's "
                f"vocabulary has {info.vocab_size}; check that they belong together"
            )

    def close(self) -> None:
        self._output = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Made(NamedTuple):
    """A loaded model and what makes vectors of it."""

    model: EncoderModel
    output: Output
    labels: tuple[str, ...] = ()
    sentence: SentenceConfig | None = None


def _make_from_encoder(
    files: ModelFiles,
    family: EncoderFamily,
    task: EncodeTask,
    dtype: torch.dtype,
    device: torch.device,
    sentence: SentenceConfig | None,
) -> _Made:
    if dtype == torch.int8:
        raise ModelError("int8 is not for encoders; use bfloat16 or float32")
    if task == "score":
        raise ModelError(
            f"{files.name} is an encoder of the {family.stem} family, which has no log-likelihoods "
            "of texts; give a decoder (a ...ForCausalLM model) for the task score"
        )
    if task == "classify":
        return _make_classifier(files, family, dtype, device)
    sentence = sentence or read_sentence_config(files)
    model = _load_encoder(files, family, dtype, device, extra={})
    return _Made(model, EmbedOutput(model, sentence), sentence=sentence)


def _runs_natively(files: ModelFiles, family: EncoderFamily, device: torch.device) -> bool:
    outline = family.make(files.config, dtype=torch.float32, device=torch.device("meta"))
    return native_encoder.supports(outline, device=device)


def _make_classifier(
    files: ModelFiles, family: EncoderFamily, dtype: torch.dtype, device: torch.device
) -> _Made:
    if not family.is_classifier(files.config):
        raise _no_classifier(files)
    labels = read_labels(files.config)
    outline = family.make(files.config, dtype=dtype, device=torch.device("meta"))
    head = family.make_head(
        files.config, size=outline.hidden_size, num_labels=len(labels.names), device=device
    )
    model = _load_encoder(files, family, dtype, device, extra=head.places())
    return _Made(model, ClassifyOutput(model, head, labels), labels=labels.names)


def _no_classifier(files: ModelFiles) -> ModelError:
    return ModelError(
        f"{files.name} has the architecture {files.config.get('architectures')!r} and no "
        "classification head; give a ...ForSequenceClassification model, or give choices, which a "
        "language model scores"
    )


def _load_encoder(
    files: ModelFiles,
    family: EncoderFamily,
    dtype: torch.dtype,
    device: torch.device,
    *,
    extra: Places,
) -> EncoderModel:
    """The model with its weights; `extra` are a head's places, filled too. With int16 it is the
    native one.
    """
    names = names_in(files.weight_files)
    values = torch.float32 if dtype == torch.int16 else dtype

    def by_name(model: LoadedEncoder) -> Places:
        return {**in_files(names, model.places(), family.prefix), **extra}

    outline = by_name(family.make(files.config, dtype=values, device=torch.device("meta")))
    check_weights(
        files.weight_files, outline, is_ignored=partial(is_foreign, places=outline, family=family)
    )
    model = family.make(files.config, dtype=values, device=device)
    load_weights(files.weight_files, by_name(model))
    if dtype == torch.int16:
        assert isinstance(model, BertModel)
        return NativeEncoder(model)
    return model


def _make_from_decoder(
    files: ModelFiles,
    task: EncodeTask,
    dtype: torch.dtype,
    device: torch.device,
    sentence: SentenceConfig | None,
) -> _Made:
    if task == "classify":
        return _make_decoder_classifier(files, dtype, device)
    if task == "score":
        scorer = load_causal(files, dtype, device)
        return _Made(scorer, ScoreOutput(scorer))
    sentence = sentence or read_sentence_config(files, is_decoder=True)
    model = load_causal(files, dtype, device, has_head=False)
    return _Made(model, EmbedOutput(model, sentence), sentence=sentence)


def _make_decoder_classifier(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> _Made:
    find_decoder_family(files.config)  # says what is supported
    if not architecture_names(files.config)[0].endswith(CLASSIFIER):
        raise _no_classifier(files)
    labels = read_labels(files.config)
    model = load_causal(files, dtype, device, has_head=False)
    head = LastTokenHead(size=model.hidden_size, num_labels=len(labels.names), device=device)
    places = head.places()
    check_weights(files.weight_files, places, is_ignored=lambda name: name not in places)
    load_weights(files.weight_files, places)
    return _Made(model, ClassifyOutput(model, head, labels), labels=labels.names)


def load_causal(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, *, has_head: bool = True
) -> CausalModel:
    """A decoder as a reader of texts.

    Args:
        files: the checked folder.
        dtype: of what is multiplied; int8 on the native decoder only.
        device: where it computes.
        has_head: False: only hidden states will be asked. The embedding stands for the head then,
            which takes no memory.

    Raises:
        ModelError: the architecture or the number format is not supported, or the weights do not
            belong to config.json.
    """
    family = find_decoder_family(files.config)
    config = family.read_config(files.config)
    if not has_head:
        config = replace(config, tie_embeddings=True)
    values = torch.bfloat16 if dtype == torch.int8 else dtype
    names = names_in(files.weight_files)

    def by_name(model: WeightedModel) -> Places:
        plain = {name.removeprefix("model."): place for name, place in model.places().items()}
        return in_files(names, plain, "model.") if "lm_head.weight" not in plain else model.places()

    outline = family.build(config, dtype=values, device=torch.device("meta"))
    wanted = by_name(outline)
    check_weights(
        files.weight_files,
        wanted,
        is_ignored=lambda name: (
            name not in wanted and (outline.is_ignored(name) or name.startswith("score."))
        ),
    )
    if dtype == torch.int8 and not native.supports(outline, dtype=dtype, device=device):
        raise ModelError(
            "int8 needs a processor with AVX-512 (BF16 and VNNI), a C++ compiler, and layer sizes "
            f"that are multiples of {native.LANES}; use bfloat16 or float32"
        )
    model = family.build(config, dtype=values, device=device)
    load_weights(files.weight_files, by_name(model))
    assert isinstance(model, DecoderModel)
    if native.supports(model, dtype=dtype, device=device):
        return make_causal(native.NativeDecoder(model, dtype, has_head=has_head), device)
    return make_causal(model, device)


def _describe(
    files: ModelFiles, made: _Made, task: EncodeTask, dtype: torch.dtype, device: torch.device
) -> EncoderInfo:
    native_bytes = made.model.scratch_bytes if isinstance(made.model, NativeEncoder) else 0
    return EncoderInfo(
        name=files.name,
        task=task,
        width=made.output.width,
        labels=made.labels,
        vocab_size=made.model.vocab_size,
        max_len=_max_len(files, made, task),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=made.model.weights_bytes,
        activation_bytes_per_token=made.model.activation_bytes_per_token,
        num_parameters=made.model.num_parameters,
        scratch_bytes=made.output.scratch_bytes + native_bytes,
    )


def _max_len(files: ModelFiles, made: _Made, task: EncodeTask) -> int:
    """Most tokens of a text: as sentence-transformers has it for embeddings, and never more than
    the model has positions for.
    """
    if made.sentence is not None and made.sentence.max_seq_length is not None:
        return min(made.sentence.max_seq_length, made.model.max_len)
    if task == "score":
        return made.model.max_len
    path = files.folder / "tokenizer_config.json"
    config: Mapping[str, object] = read_optional_json(path, wanted_for="the longest text")
    limit = config.get("model_max_length")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit >= 1:
        return int(min(limit, made.model.max_len))
    return made.model.max_len
