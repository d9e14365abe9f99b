"""From hidden states to a text's vector: pooling and projections, labels, log-likelihoods.

Legend: N texts, T tokens, D hidden size, B texts of equal length, L tokens of each, W width of a
vector, S scored tokens, V vocabulary.

All of it is float32, whatever the model's weights are: it is a small part of the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from workers.encoding import PackedTexts, Places
from workers.errors import ModelError
from workers.loading.sentence import DenseConfig, PoolingMode, SentenceConfig
from workers.models.causal import CausalModel
from workers.models.encoder import Activation, EncoderModel, LayerNorm, find_activation
from workers.models.layers import Linear, Make
from workers.models.packed import find_runs
from workers.models.weights import Places as WeightPlaces
from workers.models.weights import check_weights, load_weights

LOGITS_AT_ONCE = 16 << 20
"""Numbers of logits that are written down at once when texts are scored (64 MiB)."""


class Output(Protocol):
    """Texts to vectors."""

    @property
    def width(self) -> int: ...

    @property
    def scratch_bytes(self) -> int:
        """Upper estimate of scratch memory beside the model's, whatever the texts."""
        ...

    def __call__(self, texts: PackedTexts) -> Tensor:
        """(N, width), float32. Each text has a token."""
        ...


# -- embeddings --


class EmbedOutput:
    """Pooled hidden states, projected and normalised as the model's files say."""

    scratch_bytes = 0  # what is pooled is smaller than what a layer had alive

    def __init__(self, model: EncoderModel, config: SentenceConfig) -> None:
        self._model = model
        self._config = config
        self._dense = [Dense(item, model.device) for item in config.dense]
        self.width = len(config.pooling) * model.hidden_size
        for dense in config.dense:
            if dense.num_inputs != self.width:
                raise ModelError(
                    f"{dense.weights.parent / 'config.json'}: in_features is {dense.num_inputs}, "
                    f"but the vector before it has {self.width} numbers"
                )
            self.width = dense.num_outputs

    def __call__(self, texts: PackedTexts) -> Tensor:
        x_ND = pool(self._model.hidden(texts), texts, self._config.pooling)
        for dense in self._dense:
            x_ND = dense(x_ND)
        return functional.normalize(x_ND, dim=1) if self._config.normalize else x_ND


def pool(hidden_TD: Tensor, texts: PackedTexts, modes: Sequence[PoolingMode]) -> Tensor:
    """One vector a text: (N, modes x D). Tokens before `texts.first_N` are left out; of a text that
    has no others, the last is taken.
    """
    num_texts, size = len(texts), hidden_TD.shape[1]
    out_NMD = torch.empty(num_texts, len(modes), size, device=hidden_TD.device)
    for run in find_runs(texts.ends_N):
        x_BLD = hidden_TD[run.begin : run.end].unflatten(0, (run.num_texts, -1))
        first_B = None
        if texts.first_N is not None:
            first = np.minimum(texts.first_N[run.first : run.last], run.length - 1)
            first_B = torch.from_numpy(first).to(hidden_TD.device)
        for index, mode in enumerate(modes):
            out_NMD[run.first : run.last, index] = _pool_run(x_BLD, mode, first_B)
    return out_NMD.flatten(1)


def _pool_run(x_BLD: Tensor, mode: PoolingMode, first_B: Tensor | None) -> Tensor:
    """(B, D) of texts of equal length."""
    if mode == "lasttoken":
        return x_BLD[:, -1]
    if mode == "cls":
        texts_B = torch.arange(len(x_BLD), device=x_BLD.device)
        return x_BLD[:, 0] if first_B is None else x_BLD[texts_B, first_B]
    position_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
    counts_BL = None if first_B is None else position_L >= first_B[:, None]
    if mode == "max":
        seen = x_BLD if counts_BL is None else x_BLD.masked_fill(~counts_BL[..., None], -math.inf)
        return seen.amax(dim=1)
    if counts_BL is None and mode == "mean":
        return x_BLD.mean(dim=1)
    counts_BL = torch.ones_like(x_BLD[..., 0]) if counts_BL is None else counts_BL.float()
    weight_BL = counts_BL * (position_L + 1) if mode == "weightedmean" else counts_BL
    total_BD = torch.bmm(weight_BL[:, None], x_BLD)[:, 0]
    weight_B1 = weight_BL.sum(dim=1, keepdim=True)
    return total_BD / (weight_B1.sqrt() if mode == "mean_sqrt_len" else weight_B1)


class Dense:
    """A projection of sentence-transformers: `activation(linear(x))`."""

    def __init__(self, config: DenseConfig, device: torch.device) -> None:
        make = Make(torch.float32, device)
        self._linear = Linear(make, config.num_outputs, config.num_inputs, bias=config.bias)
        self._activate = _DENSE_ACTIVATIONS[config.activation]
        places = dict(self._linear.places("linear"))
        check_weights([config.weights], places, is_ignored=lambda _: False)
        load_weights([config.weights], places)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._activate(self._linear(x_NI))


def _identity(x: Tensor) -> Tensor:
    return x


_DENSE_ACTIVATIONS: Mapping[str, Activation] = {
    "identity": _identity,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}


# -- labels --


class ClassifyHead(Protocol):
    """Hidden states to logits of labels."""

    def __call__(self, hidden_TD: Tensor, texts: PackedTexts) -> Tensor:
        """(N, labels), float32."""
        ...

    def places(self) -> WeightPlaces:
        """Where its tensors go, by their names in the files."""
        ...


class Labels(NamedTuple):
    """What a model tells apart.

    Attributes:
        names: in the order of the logits.
        are_exclusive: exactly one holds for a text, so that probabilities add up to 1; else each
            has a probability of its own.
    """

    names: tuple[str, ...]
    are_exclusive: bool


def read_labels(raw: Mapping[str, object]) -> Labels:
    """Labels of a sequence classifier, from its config.json.

    Raises:
        ModelError: the model predicts numbers and not labels, or the labels are damaged.
    """
    kind = raw.get("problem_type")
    if kind == "regression":
        raise ModelError(
            "config.json: problem_type is 'regression': the model predicts numbers and no labels, "
            "which classify does not support; give a model with single_label_classification or "
            "multi_label_classification"
        )
    if kind not in (None, "single_label_classification", "multi_label_classification"):
        raise ModelError(f"config.json: problem_type is {kind!r}, which is not known")
    names = _label_names(raw)
    return Labels(names, kind != "multi_label_classification" and len(names) > 1)


def _label_names(raw: Mapping[str, object]) -> tuple[str, ...]:
    found = raw.get("id2label")
    if found is None:
        count = raw.get("num_labels", 2)
        if type(count) is not int or count < 1:
            raise ModelError(f"config.json: num_labels is {count!r}; a number above 0 is wanted")
        return tuple(f"LABEL_{index}" for index in range(count))
    by_id = cast("Mapping[str, object]", found) if isinstance(found, dict) else {}
    names = [by_id.get(str(index)) for index in range(len(by_id))]
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: id2label is {found!r}; names for 0, 1, 2, ... are wanted")
    return tuple(map(str, names))


class ClassifyOutput:
    """Probabilities of labels."""

    scratch_bytes = 0

    def __init__(self, model: EncoderModel, head: ClassifyHead, labels: Labels) -> None:
        self._model = model
        self._head = head
        self._labels = labels
        self.width = len(labels.names)

    def __call__(self, texts: PackedTexts) -> Tensor:
        logits_NW = self._head(self._model.hidden(texts), texts)
        if self._labels.are_exclusive:
            return logits_NW.softmax(dim=1)
        return logits_NW.sigmoid()


class MakeHead(Protocol):
    """Makes the head of a family, uninitialised."""

    def __call__(
        self, raw: Mapping[str, object], *, size: int, num_labels: int, device: torch.device
    ) -> ClassifyHead: ...


class DenseHead:
    """A projection, an activation and perhaps a norm of one pooled vector, then the labels.

    Args:
        dense: name of the projection in the files.
        activate: behind it.
        classifier: name of the projection to the labels.
        size: D.
        num_labels: W.
        device: where it computes.
        pooling: of the hidden states.
        bias: of the first projection.
        norm: name and settings of the norm behind the activation, if any.
    """

    def __init__(
        self,
        dense: str,
        activate: Activation,
        classifier: str,
        *,
        size: int,
        num_labels: int,
        device: torch.device,
        pooling: Literal["cls", "mean"] = "cls",
        bias: bool = True,
        norm: tuple[str, LayerNorm] | None = None,
    ) -> None:
        make = Make(torch.float32, device)
        self._names = dense, classifier
        self._activate = activate
        self._pooling: tuple[PoolingMode, ...] = (pooling,)
        self._dense = Linear(make, size, size, bias=bias)
        self._norm = norm
        self._classifier = Linear(make, num_labels, size, bias=True)

    def __call__(self, hidden_TD: Tensor, texts: PackedTexts) -> Tensor:
        x_ND = self._activate(self._dense(pool(hidden_TD, texts, self._pooling)))
        return self._classifier(x_ND if self._norm is None else self._norm[1](x_ND))

    def places(self) -> WeightPlaces:
        dense, classifier = self._names
        places = dict([*self._dense.places(dense), *self._classifier.places(classifier)])
        if self._norm is not None:
            name, norm = self._norm
            places.update(norm.places(name))
        return places


class LastTokenHead:
    """A projection of the last token's hidden state: of decoders."""

    def __init__(self, *, size: int, num_labels: int, device: torch.device) -> None:
        self._score = Linear(Make(torch.float32, device), num_labels, size, bias=False)

    def __call__(self, hidden_TD: Tensor, texts: PackedTexts) -> Tensor:
        return self._score(pool(hidden_TD, texts, ("lasttoken",)))

    def places(self) -> WeightPlaces:
        return dict(self._score.places("score"))


def bert_head(
    raw: Mapping[str, object], *, size: int, num_labels: int, device: torch.device
) -> ClassifyHead:
    """BERT: the pooler, which the model itself has, and a projection."""
    del raw
    return DenseHead(
        "bert.pooler.dense",
        torch.tanh,
        "classifier",
        size=size,
        num_labels=num_labels,
        device=device,
    )


def roberta_head(
    raw: Mapping[str, object], *, size: int, num_labels: int, device: torch.device
) -> ClassifyHead:
    """RoBERTa, XLM-RoBERTa, CamemBERT."""
    del raw
    return DenseHead(
        "classifier.dense",
        torch.tanh,
        "classifier.out_proj",
        size=size,
        num_labels=num_labels,
        device=device,
    )


def distilbert_head(
    raw: Mapping[str, object], *, size: int, num_labels: int, device: torch.device
) -> ClassifyHead:
    """DistilBERT."""
    del raw
    return DenseHead(
        "pre_classifier",
        functional.relu,
        "classifier",
        size=size,
        num_labels=num_labels,
        device=device,
    )


def modernbert_head(
    raw: Mapping[str, object], *, size: int, num_labels: int, device: torch.device
) -> ClassifyHead:
    """ModernBERT: of the first token or of the mean, as the config says."""
    pooling = raw.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ModelError(f"config.json: classifier_pooling is {pooling!r}; cls or mean is wanted")
    eps = raw.get("norm_eps", 1e-5)
    norm_bias = raw.get("norm_bias") is True
    return DenseHead(
        "head.dense",
        find_activation("classifier_activation", raw.get("classifier_activation", "gelu")),
        "classifier",
        size=size,
        num_labels=num_labels,
        device=device,
        pooling=pooling,
        bias=raw.get("classifier_bias") is True,
        norm=("head.norm", LayerNorm(device, size, cast("float", eps), bias=norm_bias)),
    )


# -- log-likelihoods --


class ScoreOutput:
    """The sum of the log-likelihoods of each text's tokens given those before, in nats; those
    before `first_N` are only given.
    """

    width = 1

    def __init__(self, model: CausalModel) -> None:
        self._model = model

    @property
    def scratch_bytes(self) -> int:
        """Logits, in the weights' type and in float32, and their exponentials."""
        return 3 * 4 * max(LOGITS_AT_ONCE, self._model.vocab_size)

    def __call__(self, texts: PackedTexts) -> Tensor:
        # Added up on the host: some devices have no float64.
        logprobs_S = self.logprobs(texts).cpu().double().numpy()
        owner_S = np.repeat(np.arange(len(texts)), texts.num_scored_N)
        sums_N = np.bincount(owner_S, weights=logprobs_S, minlength=len(texts))
        return torch.from_numpy(sums_N).float()[:, None]

    def logprobs(self, texts: PackedTexts) -> Tensor:
        """Of each scored token, text after text, float32. (S)"""
        model, tokens_S = self._model, scored_tokens(texts)
        stream_SD = model.stream(texts, tokens_S - 1)
        wanted_S = torch.from_numpy(texts.token_ids_T[tokens_S].astype(np.int64)).to(model.device)
        step = max(1, LOGITS_AT_ONCE // model.vocab_size)
        found = torch.empty(len(tokens_S), device=model.device)
        for begin in range(0, len(tokens_S), step):
            logits_RV = model.logits(stream_SD[begin : begin + step])
            chosen_R = logits_RV.gather(1, wanted_S[begin : begin + step, None])[:, 0]
            found[begin : begin + step] = chosen_R - logits_RV.logsumexp(dim=1)
        return found


def scored_tokens(texts: PackedTexts) -> Places:
    """Rows of the tokens that are scored, text after text."""
    counts_N = texts.num_scored_N
    ends_S = counts_N.cumsum()
    within_S = np.arange(int(counts_N.sum())) - np.repeat(ends_S - counts_N, counts_N)
    return np.repeat(texts.ends_N - counts_N, counts_N) + within_S
