"""Prompts that are too long, made shorter where the row's own text is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flows.prompts import PromptRenderer, Rendered, Side
from workers.request import RowError

TRIES = 8


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]: ...


def shorten_prompt(
    renderer: PromptRenderer,
    encoder: Encoder,
    prompt: Rendered,
    token_ids: list[int],
    *,
    limit: int,
    side: Side,
) -> list[int] | RowError:
    """Cut the row's own text, not the template around it, until the prompt has `limit` tokens.

    Args:
        renderer: made the prompt.
        encoder: text to token ids.
        prompt: as it was rendered.
        token_ids: of it.
        limit: most tokens.
        side: which side of the text is cut off.
    """
    for _ in range(TRIES):
        if len(token_ids) <= limit:
            return token_ids
        # The template's tokens stay, so all of the surplus comes off the row's own.
        (own_ids,) = encoder.encode_batch([renderer.own_text(prompt)], add_special_tokens=False)
        surplus = len(token_ids) - limit
        keep = 1 - surplus / len(own_ids) if own_ids else 0.0
        shorter = renderer.shorten(prompt, keep=keep * 0.98, side=side)
        if shorter is None:
            break
        prompt = shorter
        (token_ids,) = encoder.encode_batch(
            [prompt.text], add_special_tokens=renderer.add_special_tokens
        )
    return RowError("prompt_too_long", f"could not be cut to {limit} tokens")
