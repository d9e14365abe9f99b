"""A runner whose engine counts: the process of the tests of the protocol.

Options: crash (when it generates), shorter (answers lack a token), talk (prints to stdout).
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.peers.protocol import Item, Settings, serve


class CountingSide:
    """Answers 1, 2, 3, ...; the first token of a row is how many runs there were."""

    def __init__(self, settings: Settings) -> None:
        self._options = settings.options
        self._num_runs = 0

    def reset(self) -> None:
        self._num_runs += 1

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        if "talk" in self._options:
            print("a library's chatter")
        if "crash" in self._options:
            raise SystemExit("the engine burst")
        missing = int("shorter" in self._options)
        return [[self._num_runs, *range(1, item.num_output_tokens - missing)] for item in items]


if __name__ == "__main__":
    serve(CountingSide)
