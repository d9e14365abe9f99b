"""What a job demands of its answers: a grammar while they are drawn, a check afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from flows.specfile import read_schema
from workers.request import Grammar

if TYPE_CHECKING:
    from flows.model import Tokenizer
    from flows.spec import JobSpec
    from workers.loading.tokenizer import Tokenizer as RealTokenizer


class OutputRules(NamedTuple):
    """Of all rows of a job; both None without a schema."""

    grammar: Grammar | None = None
    check: Callable[[str], str | None] | None = None


def output_rules(spec: JobSpec, tokenizer: Tokenizer, *, vocab_size: int) -> OutputRules:
    """Compile the job's output schema.

    Args:
        spec: the job.
        tokenizer: the model's.
        vocab_size: width of the model's logits.

    Raises:
        ValueError: the schema cannot be enforced; says why.
    """
    if spec.output_schema is None:
        return OutputRules()
    from workers.guided import compile_json_schema, validate_output

    schema = read_schema(spec.output_schema)
    grammar = None
    if spec.guided:
        real = cast("RealTokenizer", tokenizer)
        grammar = compile_json_schema(schema, real, vocab_size=vocab_size)
    return OutputRules(grammar, partial(validate_output, schema=schema))
