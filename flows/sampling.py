"""From what the job says and what the model recommends to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping

from flows.errors import SpecError
from flows.spec_model import SamplingSpec
from workers.request import SamplingParams


def resolve_sampling(spec: SamplingSpec, generation_config: Mapping[str, object]) -> SamplingParams:
    """The job's own values first, then the model's, then greedy.

    As in transformers, the model's temperature counts only when its generation_config says
    `do_sample`; its filters (top_k, top_p, min_p) count whenever tokens are drawn, and its
    repetition penalty always.

    Raises:
        SpecError: the model's generation_config holds a value that cannot be.
    """
    sampled = generation_config.get("do_sample") is True
    recommended = _number(generation_config, "temperature", 1.0) if sampled else 0.0
    temperature = recommended if spec.temperature is None else spec.temperature
    if temperature == 0:
        _check_greedy(spec)
    filters = generation_config if temperature > 0 else {}
    try:
        return SamplingParams(
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            temperature=temperature,
            top_k=int(_own(spec.top_k, filters, "top_k", 0)),
            top_p=_own(spec.top_p, filters, "top_p", 1.0),
            min_p=_own(spec.min_p, filters, "min_p", 0.0),
            repetition_penalty=_own(
                spec.repetition_penalty, generation_config, "repetition_penalty", 1.0
            ),
            presence_penalty=spec.presence_penalty,
            frequency_penalty=spec.frequency_penalty,
            stop=spec.stop,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
            logprobs=spec.logprobs,
            n=spec.n,
            seed=spec.seed,
        )
    except ValueError as fault:
        raise SpecError(
            f"{fault} (from the model's generation_config.json; give the option to override it)"
        ) from fault


def _check_greedy(spec: SamplingSpec) -> None:
    """What is asked for must have an effect."""
    idle = [name for name in ("top_k", "top_p", "min_p") if getattr(spec, name) is not None]
    if spec.n > 1:
        idle.append("n")
    if idle:
        raise SpecError(
            f"{' and '.join(idle)} given, but this model's default is greedy, where they have no "
            "effect; give --temperature too"
        )


def _own(value: float | None, config: Mapping[str, object], key: str, default: float) -> float:
    return _number(config, key, default) if value is None else value


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(
            f"the model's generation_config.json says {key}: {value!r}, which is no number; "
            f"mend it, or give --{key.replace('_', '-')}"
        )
    return float(value)
