"""Logits of every family against transformers, whatever the cut of the work into batches."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.unit.workers.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model
from workers.backends.base import Batch, Segment
from workers.backends.torch_backend import TorchBackend
from workers.loading.files import resolve_model
from workers.models.step import lay_out

TOLERANCE = 1e-4
BLOCK_SIZE = 16
NUM_BLOCKS = 128


@dataclass
class Row:
    """The part of a sequence that a model reads, and its blocks."""

    token_ids: list[int]
    block_table: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)

    def segment(self, start: int, num_tokens: int) -> Segment:
        return Segment(self, start, num_tokens, self.block_table, sample=True)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    @cache
    def make(family: str) -> Path:
        return make_tiny_model(family, tmp_path_factory.mktemp(family))

    return make


@pytest.fixture(scope="session")
def reference(tiny_folder):
    """Logits (L, V) of all positions by transformers, eager attention."""
    from transformers import AutoModelForCausalLM

    @cache
    def model(family: str):
        return AutoModelForCausalLM.from_pretrained(
            tiny_folder(family), attn_implementation="eager", dtype=torch.float32
        )

    def logits(family: str, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(family)(torch.tensor([token_ids])).logits[0]

    return logits


@pytest.fixture(scope="session")
def load(tiny_folder):
    @cache
    def backend(family: str, dtype: str = "float32", deterministic: bool = False) -> TorchBackend:
        made = TorchBackend.load(
            resolve_model(str(tiny_folder(family))),
            device="cpu",
            dtype=dtype,
            deterministic=deterministic,
        )
        made.allocate(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        poison(made)
        return made

    return backend


def poison(backend: TorchBackend) -> None:
    """What was never written must never be read."""
    for layer in backend._pool.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))


def make_rows(*lengths: int, seed: int = 0) -> list[Row]:
    """Random rows over scattered blocks that share none."""
    rng = random.Random(seed)
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    rows = []
    for length in lengths:
        num_blocks = -(-length // BLOCK_SIZE)
        table, blocks = blocks[:num_blocks], blocks[num_blocks:]
        rows.append(Row([rng.randrange(VOCAB_SIZE) for _ in range(length)], table))
    return rows


def run(backend: TorchBackend, *segments: Segment) -> torch.Tensor:
    """Float32 logits after each segment."""
    with torch.inference_mode():
        logits = backend._model.logits(lay_out(Batch(segments), BLOCK_SIZE), backend._pool)
        num_sampled = sum(segment.sample for segment in segments)
        return logits.rows(torch.arange(num_sampled))


def assert_equal(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    worst = (got - want).abs().max().item()
    assert worst <= tolerance, f"logits differ by {worst}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_one_chunk(family, load, reference) -> None:
    (row,) = make_rows(50)
    got = run(load(family), row.segment(0, 50))
    assert_equal(got[0], reference(family, row.token_ids)[-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(0, 7, 33, 50), (0, 16, 17, 18, 50), (0, 49, 50)])
def test_a_prompt_in_several_chunks(family, cuts, load, reference) -> None:
    (row,) = make_rows(50, seed=1)
    want = reference(family, row.token_ids)
    for begin, end in itertools.pairwise(cuts):
        got = run(load(family), row.segment(begin, end - begin))
        assert_equal(got[0], want[end - 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token(family, load, reference) -> None:
    (row,) = make_rows(40, seed=2)
    got = torch.cat([run(load(family), row.segment(at, 1)) for at in range(40)])
    assert_equal(got, reference(family, row.token_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_many_sequences_packed_in_one_batch(family, load, reference) -> None:
    """First chunks, later chunks and single tokens of seven sequences at once."""
    rows = make_rows(50, 31, 18, 42, 9, 2, 60, seed=3)
    backend = load(family)
    run(backend, rows[1].segment(0, 20), rows[3].segment(0, 41), rows[4].segment(0, 8))
    run(backend, rows[6].segment(0, 59))
    segments = [
        rows[0].segment(0, 50),
        rows[1].segment(20, 11),
        rows[2].segment(0, 18),
        rows[5].segment(0, 2),
        rows[3].segment(41, 1),
        rows[4].segment(8, 1),
        rows[6].segment(59, 1),
    ]
    got = run(backend, *segments)
    for segment, logits in zip(segments, got, strict=True):
        want = reference(family, segment.seq.token_ids)[segment.start + segment.num_tokens - 1]
        assert_equal(logits, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_mode_computes_the_same(family, load, reference) -> None:
    rows = make_rows(45, 20, seed=4)
    backend = load(family, deterministic=True)
    got = run(backend, rows[0].segment(0, 45), rows[1].segment(0, 19))
    assert_equal(got[0], reference(family, rows[0].token_ids)[44])
    got = run(backend, rows[1].segment(19, 1))
    assert_equal(got[0], reference(family, rows[1].token_ids)[19])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close(family, load, reference) -> None:
    """Within a twentieth of the logits' spread, over chunk and single tokens."""
    (row,) = make_rows(40, seed=5)
    want = reference(family, row.token_ids)
    backend = load(family, dtype="bfloat16")
    got = [run(backend, row.segment(0, 30))[0]]
    got += [run(backend, row.segment(at, 1))[0] for at in range(30, 40)]
    assert_equal(torch.stack(got), want[29:], tolerance=0.05 * (want.max() - want.min()).item())


def test_only_sampled_segments_have_logits(load) -> None:
    rows = make_rows(10, 6, seed=6)
    first = rows[0].segment(0, 9)._replace(sample=False)
    assert run(load("llama"), first, rows[1].segment(0, 6)).shape == (1, VOCAB_SIZE)
    assert run(load("llama"), first).shape == (0, VOCAB_SIZE)
    assert run(load("llama", deterministic=True), first).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_first_batch_may_sample_nothing(tiny_folder, dtype) -> None:
    """A chunk of a long prompt can be all there is in the first step."""
    backend = TorchBackend.load(resolve_model(str(tiny_folder("llama"))), device="cpu", dtype=dtype)
    backend.allocate(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    (row,) = make_rows(10)
    chunk = row.segment(0, 9)._replace(sample=False)
    assert backend.execute(Batch((chunk,))).sampled == ()


def test_writing_again_changes_nothing(load) -> None:
    (row,) = make_rows(20, seed=7)
    backend = load("qwen3")
    first = run(backend, row.segment(0, 20))
    assert torch.equal(run(backend, row.segment(0, 20)), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_c52_deterministic_results_do_not_depend_on_the_batch(family, dtype, load) -> None:
    """Bit by bit: alone, in other company, at another place in the batch, over other blocks."""
    lengths = (23, 64, 9, 41, 33, 57)
    backend = load(family, dtype, deterministic=True)
    alone = [run_to_end(backend, [row]) for row in make_rows(*lengths, seed=8)]
    for order in ((5, 3, 1, 0, 4, 2), (2, 0), (1, 4, 3)):
        rows = make_rows(*lengths, seed=8)
        for row, moved in zip(rows, make_rows(*lengths, seed=9), strict=True):
            row.block_table = moved.block_table
        together = run_to_end(backend, [rows[index] for index in order])
        for place, index in enumerate(order):
            assert torch.equal(together[:, place], alone[index][:, 0])


def run_to_end(backend: TorchBackend, rows: list[Row], num_singles: int = 4) -> torch.Tensor:
    """Prompts in one batch of chunks, then single tokens: (1 + num_singles, rows, V)."""
    ends = [len(row.token_ids) for row in rows]
    prompts = [row.segment(0, end - num_singles) for row, end in zip(rows, ends, strict=True)]
    steps = [run(backend, *prompts)]
    steps += [
        run(backend, *(row.segment(end - back, 1) for row, end in zip(rows, ends, strict=True)))
        for back in range(num_singles, 0, -1)
    ]
    return torch.stack(steps)
