"""What all benchmarks share: the command line, the workload, the checks, the JSON and the table."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from tests.bench.peers.protocol import Item

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "flows" / "samples" / "debian_packages.parquet"

Sense = Literal[">=", "<="]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts in order of arrival."""

    name: str
    items: tuple[Item, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.num_output_tokens for item in self.items)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "num_prompts": len(self.items),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number that an issue or the README states, in its words."""

    name: str
    value: float
    bound: float
    sense: Sense

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.sense == ">=" else self.value <= self.bound

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "holds": self.holds}


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer of [low, high] whose logarithm is uniform."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def mixed_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    prompt_tokens: tuple[int, int] = (16, 512),
    output_tokens: tuple[int, int] = (8, 256),
    seed: int = 0,
) -> Workload:
    """Stretches of real text, of log-uniform lengths; the same arguments give the same workload."""
    texts = pq.read_table(SAMPLE)["description"].to_pylist()
    stream = tokenizer.encode("\n\n".join(texts), add_special_tokens=False).ids
    rng = random.Random(seed)
    items = mixed_items(
        stream, rng, num_prompts, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    return Workload(name="mixed", items=tuple(items))


def mixed_items(
    stream: Sequence[int],
    rng: random.Random,
    num_prompts: int,
    *,
    prompt_tokens: tuple[int, int] = (16, 512),
    output_tokens: tuple[int, int] = (8, 256),
) -> Iterator[Item]:
    """What `mixed_workload` takes from the tokens of a text."""
    for _ in range(num_prompts):
        length = log_uniform(rng, *prompt_tokens)
        start = rng.randrange(len(stream) - length)
        yield Item(tuple(stream[start : start + length]), log_uniform(rng, *output_tokens))


def arguments(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """--json FILE, --quick, --rounds N."""
    return argument_parser(doc).parse_args(argv)


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of every benchmark, to which one may add its own."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="a version of about a minute")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved runs of each side")
    return parser


def write_report(
    path: Path | None,
    *,
    machine: Mapping[str, object],
    settings: Mapping[str, object],
    runs: Sequence[Mapping[str, object]],
    checks: Sequence[Check],
    summary: Mapping[str, object],
) -> None:
    """One JSON object: machine, settings, raw runs, summary, checks, date."""
    if path is None:
        return
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "settings": settings,
        "runs": list(runs),
        "summary": summary,
        "checks": [check.as_json() for check in checks],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    table = Table(title="Checks", title_justify="left")
    for column in ("what", "value", "bound", "holds"):
        table.add_column(column)
    for check in checks:
        holds = "yes" if check.holds else "NO"
        table.add_row(check.name, f"{check.value:.2f}", f"{check.sense} {check.bound:g}", holds)
    console.print(table)
