"""What number formats cost in quality: perplexity and agreement with float32.

    python -m tests.bench.quality --json FILE [--quick]

SmolLM2-135M over stretches of real text, all positions: perplexity, how often the likeliest token
is float32's, and the share of the tokens of greedy answers that are float32's until the first that
differs. No clock is read: the machine may be busy.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from flows.calibration import num_cores, processor_name
from tests.bench.common import SAMPLE, Check, arguments, mixed_workload, show_checks, write_report
from tests.bench.peers.headrace_runner import HeadraceSide
from tests.bench.peers.protocol import Settings
from tests.bench.sides import KV_BYTES
from workers.backends.torch_encoder import load_causal
from workers.encoding import PackedTexts
from workers.loading.files import ModelFiles, resolve_model
from workers.models.device import DtypeName, pick_dtype

MODEL = "smollm2"
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "int8")
MAX_TOKENS = 256
MIN_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of one number format over all positions of the texts.

    Attributes:
        perplexity: e to the mean negative log-likelihood of the next token.
        top1_agreement: share of positions whose likeliest token is float32's.
        greedy_agreement: share of greedily answered tokens before the first that is not float32's.
    """

    dtype: str
    perplexity: float
    top1_agreement: float
    greedy_agreement: float


class Scorer:
    """Log-likelihoods of texts by one loaded model."""

    def __init__(self, files: ModelFiles, dtype: DtypeName) -> None:
        device = torch.device("cpu")
        self._model = load_causal(files, pick_dtype(dtype, device), device)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> tuple[float, torch.Tensor]:
        """Summed negative log-likelihood of all tokens but the first, and the likeliest tokens."""
        stream_TD = self._model.stream(
            PackedTexts.from_lists([token_ids]), np.arange(len(token_ids))
        )
        logits_TV = self._model.logits(stream_TD)
        log_probs = torch.log_softmax(logits_TV[:-1].double(), dim=1)
        wanted = log_probs.gather(1, torch.tensor(token_ids[1:])[:, None])
        return -wanted.sum().item(), logits_TV.argmax(dim=1)


def texts_of(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Token ids of the sample's longer descriptions."""
    texts = pq.read_table(SAMPLE)["description"].to_pylist()
    long_texts = [text for text in texts if len(text) >= MIN_CHARACTERS]
    encode = tokenizer.encode
    return [encode(text, add_special_tokens=False).ids[:MAX_TOKENS] for text in long_texts[:count]]


def measure(*, quick: bool) -> list[Quality]:
    files = resolve_model(MODEL)
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    texts = texts_of(tokenizer, 10 if quick else 60)
    workload = mixed_workload(tokenizer, num_prompts=8 if quick else 40, output_tokens=(32, 64))
    found: list[Quality] = []
    exact_tokens, exact_answers = torch.empty(0), dict[int, tuple[int, ...]]()
    for dtype in DTYPES:
        scorer = Scorer(files, dtype)
        scores = [scorer.score(ids) for ids in texts]
        tokens = torch.cat([likeliest for _, likeliest in scores])
        settings = Settings(model=files.name, dtype=dtype, threads=num_cores(), kv_bytes=KV_BYTES)
        generated = HeadraceSide(settings).generate(workload.items)
        answers = dict(enumerate(map(tuple, generated)))
        if dtype == DTYPES[0]:
            exact_tokens, exact_answers = tokens, answers
        found.append(
            Quality(
                dtype=dtype,
                perplexity=math.exp(
                    sum(loss for loss, _ in scores) / sum(len(ids) - 1 for ids in texts)
                ),
                top1_agreement=(tokens == exact_tokens).double().mean().item(),
                greedy_agreement=greedy_agreement(answers, exact_answers),
            )
        )
    return found


def greedy_agreement(
    answers: dict[int, tuple[int, ...]], exact: dict[int, tuple[int, ...]]
) -> float:
    """Share of all answered tokens that come before a row's first difference."""
    equal = sum(
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(answers[row], exact[row]))))  # noqa: B905
        for row in exact
    )
    return equal / sum(map(len, exact.values()))


def checks_of(found: Sequence[Quality]) -> list[Check]:
    by_dtype = {item.dtype: item for item in found}
    base = by_dtype["bfloat16"].perplexity
    ratio = by_dtype["int8"].perplexity / base
    name = "perplexity of int8, as a multiple of bfloat16's"
    return [Check(name=name, value=ratio, bound=1.02, sense="<=")]


def show(console: Console, found: Sequence[Quality]) -> None:
    table = Table(title=f"{MODEL}: quality of number formats", title_justify="left")
    for column in ("", "perplexity", "top-1 as float32", "greedy tokens as float32"):
        table.add_column(column, justify="right" if column else "left")
    for item in found:
        table.add_row(
            item.dtype,
            f"{item.perplexity:.3f}",
            f"{item.top1_agreement:.1%}",
            f"{item.greedy_agreement:.1%}",
        )
    console.print(table)
    show_checks(console, checks_of(found))


def main() -> None:
    options = arguments(__doc__)
    console = Console()
    found = measure(quick=options.quick)
    show(console, found)
    write_report(
        options.json,
        machine={"cpu": processor_name(), "python": platform.python_version()},
        settings={"model": MODEL, "quick": options.quick, "max_tokens": MAX_TOKENS},
        runs=[asdict(item) for item in found],
        summary={},
        checks=checks_of(found),
    )


if __name__ == "__main__":
    main()
