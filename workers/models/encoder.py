"""What all encoders share: the protocol that heads and pooling build on, and small layers.

Legend: T tokens of a batch, D hidden size, I intermediate size, O outputs.

Between two products all is float32: the residual stream, norms, and what is pooled. Only what goes
into a product has the weights' type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from workers.encoding import PackedTexts
from workers.errors import ModelError
from workers.models.layers import Linear, Make
from workers.models.weights import Place, Places

Activation = Callable[[Tensor], Tensor]
Named = tuple[str, Place]


class EncoderSizes(Protocol):
    """What every encoder and its config say."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_len(self) -> int:
        """Most tokens of a text."""
        ...


class EncoderModel(EncoderSizes, Protocol):
    """A model up to its last hidden states; pooling and heads come behind it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def weights_bytes(self) -> int:
        """Resident size of the weights."""
        ...

    @property
    def activation_bytes_per_token(self) -> int:
        """Upper estimate of scratch memory per token of a batch."""
        ...

    @property
    def num_parameters(self) -> int:
        """Those that each token is multiplied with."""
        ...

    def hidden(self, batch: PackedTexts) -> Tensor:
        """The last hidden states (T, D), float32, on the model's device. Each text has a token."""
        ...


class LoadedEncoder(EncoderModel, Protocol):
    """An encoder that weight files can be read into."""

    def places(self) -> Places:
        """Where each tensor of the weight files goes, by its name without the model's prefix."""
        ...


C = TypeVar("C", bound=EncoderSizes)


class Configured(Generic[C]):
    """The part of `EncoderModel` that a config tells; for models to derive from."""

    config: C

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_len(self) -> int:
        return self.config.max_len


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}
"""By transformers' names."""


def find_activation(key: str, name: object) -> Activation:
    """An activation by its name in config.json.

    Raises:
        ModelError: it is not supported.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {key} is {name!r}; supported are {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


class LayerNorm:
    """Layer normalisation over the last dimension; input, weights and output are float32.

    Attributes:
        weight_D: scale.
        bias_D: shift; None: none.
        eps: added to the variance.
    """

    def __init__(self, device: torch.device, size: int, eps: float, *, bias: bool = True) -> None:
        make = Make(torch.float32, device)
        self.weight_D = make(size)
        self.bias_D = make(size) if bias else None
        self.eps = eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return functional.layer_norm(
            x_TD, self.weight_D.shape, self.weight_D, self.bias_D, self.eps
        )

    def places(self, name: str) -> Iterator[Named]:
        yield f"{name}.weight", whole(self.weight_D)
        if self.bias_D is not None:
            yield f"{name}.bias", whole(self.bias_D)


def apply(linear: Linear, x_TI: Tensor) -> Tensor:
    """A projection (T, O) of rows of any type; the output has the weights' type."""
    return linear(x_TI.to(linear.weight_OI.dtype))


def whole(tensor: Tensor) -> Place:
    """The place of a tensor that the files hold as it is."""
    return Place(tensor, tuple(tensor.shape))


def num_bytes(places: Places) -> int:
    """Memory of all tensors, those that share a fused one included."""
    return sum(place.part.nbytes for place in places.values())
