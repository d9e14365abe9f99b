"""Structured output: JSON schemas compiled to token masks, and answers checked against them.

The masks come from llguidance (extra `guided`), imported where it is used. Whitespace between JSON
tokens is fixed to what `json.dumps` writes, as models are known to loop on free whitespace until
they run out of tokens.
"""

from __future__ import annotations

import importlib.util
import json
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

from workers.errors import InternalError, ModelError
from workers.loading.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from llguidance import LLMatcher

Schema = Mapping[str, object] | str
"""A JSON schema, as an object or as its JSON text."""

MAX_CACHED_GRAMMARS = 1024


class JsonGrammar:
    """A compiled JSON schema. Satisfies `workers.request.Grammar`; shared by all rows with the same
    schema.
    """

    def __init__(self, initial: LLMatcher) -> None:
        self._initial = initial

    def matcher(self) -> JsonMatcher:
        return JsonMatcher(self._initial.deep_copy())


class JsonMatcher:
    """How far one sample has come in its schema. Satisfies `workers.request.Matcher`."""

    def __init__(self, state: LLMatcher) -> None:
        self._state = state

    def fill_mask(self, mask: object, row: int) -> None:
        """As `Matcher.fill_mask`.

        Raises:
            InternalError: `mask` is no contiguous int32 tensor on the CPU, or the grammar's state
                is broken.
        """
        if (
            not isinstance(mask, torch.Tensor)
            or mask.dtype != torch.int32
            or mask.device.type != "cpu"
        ):
            raise InternalError("a grammar mask must be an int32 tensor on the CPU")
        words = mask[row]
        if not words.is_contiguous():
            raise InternalError("a grammar mask's rows must be contiguous")
        self._state.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * 4)
        self._check()

    def accept(self, token_id: int) -> None:
        self._state.consume_token(token_id)
        self._check()

    @property
    def terminated(self) -> bool:
        return self._state.is_stopped()

    def _check(self) -> None:
        if self._state.is_error():
            raise InternalError(
                f"the grammar cannot go on: {self._state.get_error().splitlines()[0]}"
            )


def check_json_schema(schema: Schema) -> dict[str, object]:
    """The schema as an object, if it can be used. Needs no model, so that a job can be refused
    before one is loaded.

    Raises:
        ValueError: it is no JSON, no schema, empty, unsatisfiable, or uses a keyword that cannot be
            enforced.
    """
    _check_installed()
    value = _as_object(schema)
    _check_meta(value)
    _check_grammar(_grammar_text(value))
    return value


def compile_json_schema(schema: Schema, tokenizer: Tokenizer, *, vocab_size: int) -> JsonGrammar:
    """A grammar that allows exactly the JSON documents of a schema. Compiled once per distinct
    schema.

    Args:
        schema: as an object or as JSON text.
        tokenizer: the model's.
        vocab_size: width of the model's logits, at least the tokenizer's.

    Raises:
        ValueError: as `check_json_schema`.
        ModelError: llguidance is not installed, or the model has no end-of-sequence token.
    """
    _check_installed()
    value = _as_object(schema)
    compiler = _compilers.get(tokenizer)
    if compiler is None or compiler.vocab_size != vocab_size:
        compiler = _compilers[tokenizer] = _Compiler(tokenizer, vocab_size)
    return compiler.compile(value)


def validate_output(text: str, schema: Schema) -> str | None:
    """What is wrong with an answer, or None when it is JSON that meets the schema. Never repairs
    anything.
    """
    try:
        value: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as fault:
        return f"the answer is not valid JSON: {fault}"
    validator = _validator(json.dumps(_as_object(schema)))
    fault = best_match(validator.iter_errors(value))
    if fault is None:
        return None
    return f"the answer does not meet the schema at {fault.json_path}: {fault.message}"


class _Compiler:
    """Compiles for one tokenizer, and keeps the last grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        self.vocab_size = vocab_size
        self._grammars: OrderedDict[str, JsonGrammar] = OrderedDict()
        self._lock = Lock()
        eos = sorted(tokenizer.eos_token_ids)
        if not eos:
            raise ModelError(
                "the model has no end-of-sequence token, so structured output cannot end"
            )
        text = tokenizer.to_json()
        self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)

    def compile(self, schema: dict[str, object]) -> JsonGrammar:
        key = json.dumps(schema)  # order of properties is order of output: not sorted
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is None:
                grammar = self._grammars[key] = self._compile(check_json_schema(schema))
            self._grammars.move_to_end(key)
            if len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
            return grammar

    def _compile(self, schema: dict[str, object]) -> JsonGrammar:
        from llguidance import LLMatcher

        initial = LLMatcher(self._tokenizer, _grammar_text(schema), log_level=0)
        if initial.is_error():
            raise ValueError(
                f"the JSON schema cannot be used: {initial.get_error().splitlines()[0]}"
            )
        return JsonGrammar(initial)


_compilers: weakref.WeakKeyDictionary[Tokenizer, _Compiler] = weakref.WeakKeyDictionary()


def _as_object(schema: Schema) -> dict[str, object]:
    if isinstance(schema, str):
        try:
            value: object = json.loads(schema)
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"the JSON schema is not valid JSON: {fault}") from fault
    else:
        value = dict(schema)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON schema is an object, not {json.dumps(value)[:60]}")
    if not value:
        raise ValueError(
            'the JSON schema is empty and would allow anything; say at least {"type": "object"}'
        )
    return cast("dict[str, object]", value)


def _check_installed() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise ModelError(
            "structured output needs the package llguidance; install the extra: "
            "pip install 'headrace[guided]'"
        )


def _check_meta(schema: dict[str, object]) -> None:
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as fault:
        raise ValueError(
            f"the JSON schema is not valid at {fault.json_path}: {fault.message}"
        ) from fault


def _check_grammar(grammar: str) -> None:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise ValueError(f"the JSON schema cannot be used: {messages[0]}")


def _grammar_text(schema: dict[str, object]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        },
    )


@lru_cache(maxsize=64)
def _validator(schema: str) -> Validator:
    """A validator that fetches nothing from the network."""
    value = cast("dict[str, object]", json.loads(schema))
    kind = validator_for(value, default=Draft202012Validator)
    return kind(value, registry=REGISTRY)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
