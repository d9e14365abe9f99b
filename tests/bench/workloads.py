"""The workloads of the throughput benchmark: real text, forced lengths, same seed same workload.

| name | prompts | outputs |
|---|---|---|
| mixed | 16 to 512 tokens, log-uniform | 8 to 256, log-uniform |
| decode_heavy | 64 | 256 |
| prefill_heavy | 448 | 16 |
| long_tail | 32 to 256, log-uniform | log-normal: a few rows are as long as all others together |
| shared_prefix | 8 prefixes of 384, each with its own 32 | 48 |
| tiny | the demo's: a chat template around a package's description | 48 |
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import pyarrow.parquet as pq

from tests.bench.common import SAMPLE, Item, Workload, log_uniform, mixed_items
from workers.loading.tokenizer import Tokenizer

NAMES = ("mixed", "decode_heavy", "prefill_heavy", "long_tail", "shared_prefix", "tiny")
FRESH = "tiny"
"""The workload that each side does in a fresh process, start-up included."""
SHARED = "shared_prefix"
"""The workload for which sides look for prefixes that prompts share."""

QUICK_SHARE = 1 / 8
NUM_GROUPS = 8
PREFIX_TOKENS = 384
TAIL_MEDIAN = 8
TAIL_SPREAD = math.log(4) / (NormalDist().inv_cdf(0.99) - NormalDist().inv_cdf(0.95))
"""Standard deviation of the logarithm with which P99 is 4 times P95."""
TAIL_MAX = 1024
DEMO_PROMPT = "In one short sentence, say what this Debian package is for: {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What workloads are made of. `quick` makes them about an eighth."""

    tokenizer: Tokenizer
    texts: tuple[str, ...]
    stream: tuple[int, ...]
    quick: bool
    seed: int

    @classmethod
    def of_sample(cls, tokenizer: Tokenizer, *, quick: bool = False, seed: int = 0) -> Source:
        texts = tuple(pq.read_table(SAMPLE)["description"].to_pylist())
        ids = tokenizer.encode_batch(["\n\n".join(texts)], add_special_tokens=False)[0]
        return cls(tokenizer=tokenizer, texts=texts, stream=tuple(ids), quick=quick, seed=seed)

    def count(self, num_rows: int) -> int:
        return max(8, round(num_rows * QUICK_SHARE)) if self.quick else num_rows

    def rng(self) -> random.Random:
        return random.Random(self.seed)

    def text(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        """A stretch of the sample, from anywhere."""
        start = rng.randrange(len(self.stream) - num_tokens)
        return self.stream[start : start + num_tokens]


def make_workload(name: str, source: Source) -> Workload:
    """The workload of that name."""
    return Workload(name=name, items=tuple(_MAKERS[name](source)))


def _mixed(source: Source) -> Iterator[Item]:
    return mixed_items(source.stream, source.rng(), source.count(200))


def _decode_heavy(source: Source) -> Iterator[Item]:
    rng = source.rng()
    for _ in range(source.count(48)):
        yield Item(source.text(rng, 64), 64 if source.quick else 256)


def _prefill_heavy(source: Source) -> Iterator[Item]:
    rng = source.rng()
    for _ in range(source.count(44)):
        yield Item(source.text(rng, 448), 16)


def _long_tail(source: Source) -> Iterator[Item]:
    """One row from each of equally likely stretches of the law, in random order: the tail has its
    share in every workload, however few its rows are.
    """
    rng = source.rng()
    lengths = tail_lengths(source.count(96), TAIL_MAX // 4 if source.quick else TAIL_MAX)
    rng.shuffle(lengths)
    for length in lengths:
        yield Item(source.text(rng, log_uniform(rng, 32, 256)), length)


def tail_lengths(count: int, longest: int) -> list[int]:
    """Log-normal output lengths, ascending."""
    law = NormalDist(math.log(TAIL_MEDIAN), TAIL_SPREAD)
    exact = (math.exp(law.inv_cdf((index + 0.5) / count)) for index in range(count))
    return [min(longest, max(1, round(length))) for length in exact]


def _shared_prefix(source: Source) -> Iterator[Item]:
    """The rows of all groups in random order: who shares is for the engine to find."""
    rng = source.rng()
    prefixes = [source.text(rng, PREFIX_TOKENS) for _ in range(NUM_GROUPS)]
    groups = [group for group in range(NUM_GROUPS) for _ in range(source.count(160) // NUM_GROUPS)]
    rng.shuffle(groups)
    for group in groups:
        yield Item(prefixes[group] + source.text(rng, 32), 48, group, PREFIX_TOKENS)


def _tiny(source: Source) -> Iterator[Item]:
    """Not smaller when quick: most of it is start-up."""
    prompts = [
        source.tokenizer.render_chat([{"role": "user", "content": DEMO_PROMPT.format(text)}])
        for text in source.texts[:40]
    ]
    for ids in source.tokenizer.encode_batch(prompts, add_special_tokens=False):
        yield Item(tuple(ids), 48)


_MAKERS: dict[str, Callable[[Source], Iterator[Item]]] = {
    "mixed": _mixed,
    "decode_heavy": _decode_heavy,
    "prefill_heavy": _prefill_heavy,
    "long_tail": _long_tail,
    "shared_prefix": _shared_prefix,
    "tiny": _tiny,
}
