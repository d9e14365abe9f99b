"""What a model is, read from its config.json and checked before a byte of weights is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workers.errors import ModelError

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base, and how it is stretched beyond the trained length.

    Attributes:
        theta: base of the frequencies.
        kind: `default`; `linear` (positions divided by `factor`); `llama3` (low frequencies divided
            by `factor`, high ones kept, a ramp between).
        factor: stretch.
        low_freq_factor: of `llama3`: wavelengths above `original_len / low_freq_factor` are
            stretched.
        high_freq_factor: of `llama3`: wavelengths below `original_len / high_freq_factor` are kept.
        original_len: of `llama3`: trained length.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer of the Llama kind.

    Attributes:
        windows: per layer, positions that a token sees, its own included; 0: all.
        attention_bias: the q, k and v projections have biases.
        output_bias: the attention's output projection has one.
        qk_norm: q and k heads are normalised before the rotary embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_embeddings: bool
    windows: tuple[int, ...]
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        laws: tuple[tuple[bool, str], ...] = (
            (
                self.num_heads % self.num_kv_heads == 0,
                ("num_attention_heads must be a multiple of num_key_value_heads, but they are "
                f"{self.num_heads} and {self.num_kv_heads}"),
            ),
            (self.head_size % 2 == 0, f"head_dim must be even, but is {self.head_size}"),
            (
                self.hidden_size * self.num_layers <= 1 << 24,
                (f"hidden_size {self.hidden_size} times num_hidden_layers {self.num_layers} "
                "is no real model"),
            ),
            (self.vocab_size <= 1 << 24, f"vocab_size {self.vocab_size} is no real vocabulary"),
            (self.rms_eps > 0, f"rms_norm_eps must be above 0, but is {self.rms_eps}"),
            (self.rope.theta > 0, f"rope_theta must be above 0, but is {self.rope.theta}"),
        )  # fmt: skip
        for holds, fault in laws:
            if not holds:
                raise ModelError(f"config.json: {fault}")

    @property
    def num_groups(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads


class ConfigReader:
    """Typed access to config.json, with errors that name key and value."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {key} is {value!r}; a whole number above 0 is wanted")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"config.json: {key} is {value!r}; a number is wanted")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} is {value!r}; true or false is wanted")
        return value

    def rope(self) -> RopeConfig:
        """The rotary embedding, from `rope_parameters` (new) or `rope_theta` and `rope_scaling`."""
        nested: Any = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(nested, Mapping):
            raise ModelError(
                f"config.json: the rotary settings are {nested!r}; an object is wanted"
            )
        inner = ConfigReader(nested)
        theta = inner.number("rope_theta", self.number("rope_theta", 10000.0))
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(theta=theta, kind="linear", factor=inner.number("factor"))
        if kind == "llama3":
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=inner.number("factor"),
                low_freq_factor=inner.number("low_freq_factor"),
                high_freq_factor=inner.number("high_freq_factor"),
                original_len=inner.integer("original_max_position_embeddings"),
            )
        raise ModelError(
            f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are"
        )

    def shared(self) -> dict[str, Any]:
        """What all families read alike; a family adds what differs."""
        if self.raw.get("hidden_act", "silu") != "silu":
            raise ModelError(
                f"config.json: hidden_act {self.raw['hidden_act']!r}; silu is supported"
            )
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        num_layers = self.integer("num_hidden_layers")
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": self.integer("num_key_value_heads", num_heads),
            "head_size": self.integer("head_dim", max(1, hidden_size // num_heads)),
            "rms_eps": self.number("rms_norm_eps", 1e-6),
            "rope": self.rope(),
            "max_model_len": self.integer("max_position_embeddings", 2048),
            "tie_embeddings": self.flag("tie_word_embeddings", default=False),
            "windows": (0,) * num_layers,
            "attention_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "qk_norm": False,
        }

    def layer_windows(self, default_full_layers: int | None) -> tuple[int, ...]:
        """Per-layer windows: from `layer_types` if given, else sliding from `default_full_layers`
        on.

        Args:
            default_full_layers: the first layers that see everything; None: no layer slides.
        """
        num_layers = self.integer("num_hidden_layers")
        if self.raw.get("sliding_window") is None:
            return (0,) * num_layers
        window = self.integer("sliding_window")
        types: Any = self.raw.get("layer_types")
        if types is None:
            full = num_layers if default_full_layers is None else default_full_layers
            return tuple(0 if layer < full else window for layer in range(num_layers))
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelError(
                f"config.json: layer_types must list {num_layers} layers, is {types!r}"
            )
        known = {"full_attention": 0, "sliding_attention": window}
        unknown = sorted({str(kind) for kind in types} - set(known))
        if unknown:
            raise ModelError(f"config.json: layer types {', '.join(unknown)} are not supported")
        return tuple(known[kind] for kind in types)
