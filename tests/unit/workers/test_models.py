"""Each family against transformers, on small random models of the real architecture."""

from __future__ import annotations

import json

import pytest
import torch

from tests.unit.workers.tiny_models import CASES, SHARED, VOCAB_SIZE, Probe, make_reference, save
from workers.backends.base import Segment
from workers.backends.torch_backend import TorchBackend
from workers.errors import ModelError
from workers.models.registry import read_config

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    reference = make_reference(request.param)
    return reference, save(reference, tmp_path_factory.mktemp(request.param))


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=rng).tolist()


def expected(reference, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]


def test_one_chunk(case) -> None:
    reference, files = case
    ids = tokens(37)
    probe = Probe(files)
    seq, table = probe.sequence(ids), probe.table(37)
    got = probe.logits(Segment(seq, 0, 37, table, True))
    assert (got[0] - expected(reference, ids)[-1]).abs().max() < TOLERANCE


def test_several_chunks_then_token_by_token(case) -> None:
    reference, files = case
    ids = tokens(40)
    want = expected(reference, ids)
    probe = Probe(files)
    seq, table = probe.sequence(ids), probe.table(40)
    start = 0
    for count in (11, 1, 13, *[1] * 15):
        got = probe.logits(Segment(seq, start, count, table, True))
        start += count
        assert (got[0] - want[start - 1]).abs().max() < TOLERANCE
    assert start == 40


def test_several_sequences_in_one_batch(case) -> None:
    reference, files = case
    probe = Probe(files)
    lengths, started = (5, 30, 17, 12), (0, 0, 9, 11)
    sequences = [(tokens(n, seed=n), probe.table(n)) for n in lengths]
    for (ids, table), start in zip(sequences, started, strict=True):
        if start:
            probe.logits(Segment(probe.sequence(ids), 0, start, table, True))
    batch = [
        Segment(probe.sequence(ids), start, len(ids) - start, table, True)
        for (ids, table), start in zip(sequences, started, strict=True)
    ]
    got = probe.logits(*batch)
    for row, (ids, _) in enumerate(sequences):
        assert (got[row] - expected(reference, ids)[-1]).abs().max() < TOLERANCE


def test_logits_only_where_a_token_is_sampled(case) -> None:
    _, files = case
    probe = Probe(files)
    first, second = tokens(6), tokens(7)
    got = probe.logits(
        Segment(probe.sequence(first), 0, 6, probe.table(6), False),
        Segment(probe.sequence(second), 0, 7, probe.table(7), True),
    )
    assert got.shape == (1, VOCAB_SIZE)


def test_bfloat16_stays_close(case) -> None:
    reference, files = case
    ids = tokens(37)
    probe = Probe(files, dtype="bfloat16")
    got = probe.logits(Segment(probe.sequence(ids), 0, 37, probe.table(37), True))[0]
    want = expected(reference, ids)[-1]
    assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_is_bit_equal_in_any_batch(case, dtype: str) -> None:
    """C52: alone, or with others before and behind it, as chunk and as decode."""
    _, files = case
    ids = tokens(23)

    def run(num_before: int, num_behind: int) -> list[torch.Tensor]:
        probe = Probe(files, dtype=dtype, deterministic=True, num_blocks=256)
        table = probe.table(23)
        seen = []
        for start, count in ((0, 16), (16, 6), (22, 1)):
            others = [
                Segment(probe.sequence(tokens(n, seed=n)), 0, n, probe.table(n), True)
                for n in range(3, 3 + num_before + num_behind)
            ]
            if count == 1:  # decodes come behind chunks
                batch = [*others, Segment(probe.sequence(ids), start, count, table, True)]
                row = len(others)
            else:
                own = Segment(probe.sequence(ids), start, count, table, True)
                batch = [*others[:num_before], own, *others[num_before:]]
                row = num_before
            seen.append(probe.logits(*batch)[row])
        return seen

    alone = run(0, 0)
    for before, behind in ((3, 0), (0, 5), (9, 8)):
        assert all(torch.equal(a, b) for a, b in zip(alone, run(before, behind), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are Llama"),
        ({"architectures": None}, "architecture is None"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads.*6 and 4"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a whole number"),
        ({"hidden_size": 1 << 40}, "no real model"),
        ({"vocab_size": 1 << 40}, "no real vocabulary"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": [1]}, "an object is wanted"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"head_dim": 15}, "head_dim must be even"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_key_and_value(change, message) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **SHARED} | change
    with pytest.raises(ModelError, match=message):
        read_config(raw)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda c: c.update(intermediate_size=64),
            r"gate_proj.weight has shape \(112, 72\).*\(64, 72\)",
        ),
        (lambda c: c.update(num_hidden_layers=4), "no tensor model.layers.3"),
        (lambda c: c.update(num_hidden_layers=2), "does not, such as model.layers.2"),
    ],
)
def test_weights_that_do_not_match_their_config_are_named(tmp_path, edit, message) -> None:
    files = save(make_reference("llama3"), tmp_path)
    config = dict(files.config)
    edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    from dataclasses import replace

    with pytest.raises(ModelError, match=message):
        TorchBackend.load(replace(files, config=config), device="cpu", dtype="float32")
