"""Stop strings, found in a stream of tokens without decoding it again and again.

A stop string that the last token completes lies in the text of the last few tokens. Each token that
has text brings at least one byte, so the last `longest stop string in bytes` tokens before the new
one are enough, plus a margin: where the tail is cut, a character may be split (3 bytes) and a
decoder may drop a leading space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARGIN_TOKENS = 8
_REPLACEMENT = "\ufffd"


def make_find_stop(
    stops: tuple[str, ...],
    *,
    decode: Callable[[Sequence[int]], str],
    is_hidden: Callable[[int], bool],
) -> Callable[[list[int]], str | None]:
    """A stateless function from generated ids to the stop string that the last of them completed.

    Of several, the one that starts first counts. An earlier occurrence does not: it was not
    honoured when it was new.

    Args:
        stops: the stop strings, none empty.
        decode: text of ids.
        is_hidden: true of ids without text.
    """
    tail_tokens = (
        max((len(stop.encode("utf-8", "surrogatepass")) for stop in stops), default=0)
        + _MARGIN_TOKENS
    )

    def find_stop(ids: list[int]) -> str | None:
        tail = _visible_tail(ids, tail_tokens, is_hidden)
        text = decode(tail)
        if not any(stop in text for stop in stops):
            return None
        before = decode(tail[:-1])  # rare: the common case costs one short decode
        found = [(_new_occurrence(text, stop, before), stop) for stop in stops]
        hits = [(start, -len(stop), stop) for start, stop in found if start >= 0]
        return min(hits)[2] if hits else None

    return find_stop


def cut_at_stop(text: str, stop_string: str, *, before: str = "") -> str:
    """`text` up to the first occurrence of `stop_string` that ends behind `before`, the text
    without its last token.

    Unchanged when there is none.
    """
    start = _new_occurrence(text, stop_string, before)
    return text if start < 0 else text[:start]


def _new_occurrence(text: str, stop: str, before: str) -> int:
    """Start of the first occurrence that was not whole in `before` yet; -1 for none. A split
    character is not yet text.
    """
    settled = len(before.rstrip(_REPLACEMENT))
    return text.find(stop, max(0, settled - len(stop) + 1))


def _visible_tail(ids: list[int], count: int, is_hidden: Callable[[int], bool]) -> list[int]:
    """The last `count` ids that have text, and the last id whether it has or not."""
    tail = ids[-1:]
    position = len(ids) - 1
    while position > 0 and len(tail) <= count:
        position -= 1
        if not is_hidden(ids[position]):
            tail.append(ids[position])
    tail.reverse()
    return tail
