"""Sampling against a plain NumPy oracle, and the laws of the random streams."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.view import SeqId
from workers.request import Request, RequestId, Sampled, SamplingParams
from workers.sampling import BatchSampler, filters
from workers.sampling.logits import DenseLogits
from workers.sampling.seen import SeenTokens
from workers.sampling.streams import stream_key, uniforms
from workers.sequence import Sequence

CPU = torch.device("cpu")
VOCAB = 40
EOS = frozenset({2})


class AllowMatcher:
    """A matcher that always allows the same tokens."""

    def __init__(self, allowed: frozenset[int]) -> None:
        self.allowed = allowed

    def fill_mask(self, mask: object, row: int) -> None:
        assert isinstance(mask, torch.Tensor)
        bits = np.zeros(mask.shape[1] * 32, dtype=np.uint8)
        bits[list(self.allowed)] = 1
        mask[row] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed

    @property
    def terminated(self) -> bool:
        return False


class AllowGrammar:
    def __init__(self, allowed: frozenset[int]) -> None:
        self.allowed = allowed

    def matcher(self) -> AllowMatcher:
        return AllowMatcher(self.allowed)


def make_seq(
    number: int = 0,
    *,
    prompt: tuple[int, ...] = (5, 6),
    output: tuple[int, ...] = (),
    sample_index: int = 0,
    allowed: frozenset[int] | None = None,
    name: str | None = None,
    **params: Any,
) -> Sequence:
    request = Request(
        request_id=RequestId(name or f"row-{number}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**params),
        grammar=None if allowed is None else AllowGrammar(allowed),
    )
    seq = Sequence(
        SeqId(number),
        request,
        sample_index=sample_index,
        max_model_len=10_000,
        eos_token_ids=EOS,
        find_stop=None,
        arrived_s=0.0,
    )
    seq.coroutine.close()
    seq.token_ids.extend(output)
    return seq


def sampler(vocab: int = VOCAB) -> BatchSampler:
    return BatchSampler(vocab, EOS, CPU)


def sample(logits: np.ndarray, *seqs: Sequence) -> tuple[Sampled, ...]:
    rows = torch.from_numpy(np.atleast_2d(logits).astype(np.float32))
    return sampler(rows.shape[1]).sample(DenseLogits(rows), seqs)


# The oracle: one row, float64, written to be read.


def oracle_logits(logits: np.ndarray, seq: Sequence) -> np.ndarray:
    params = seq.request.sampling
    out = logits.astype(np.float64)
    for token in set(seq.token_ids):
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in seq.output_token_ids:
        out[token] -= params.frequency_penalty
    for token in set(seq.output_token_ids):
        out[token] -= params.presence_penalty
    if seq.matcher is not None:
        assert isinstance(seq.matcher, AllowMatcher)
        banned = set(range(len(out))) - seq.matcher.allowed
        out[list(banned)] = -np.inf
    if seq.num_output_tokens < params.min_tokens and seq.matcher is None:
        out[list(seq.stop_ids)] = -np.inf
    return out


def oracle_probs(logits: np.ndarray, seq: Sequence) -> np.ndarray:
    params = seq.request.sampling
    probs = softmax(oracle_logits(logits, seq) / params.temperature)
    probs = np.where(probs < params.min_p * probs.max(), 0.0, probs)
    if params.top_k:
        probs = np.where(probs < np.sort(probs)[::-1][: params.top_k][-1], 0.0, probs)
    probs /= probs.sum()
    kept, mass = 0.0, 0.0
    for value in np.sort(probs)[::-1]:
        if mass >= params.top_p:
            break
        kept, mass = value, mass + value
    probs = np.where(probs < kept, 0.0, probs) if params.top_p < 1.0 else probs
    return probs / probs.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


LOGITS = st.lists(
    st.integers(-60, 60).map(lambda x: x / 8 + 1e-3 * (x % 7)), min_size=VOCAB, max_size=VOCAB
).map(np.array)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8).map(tuple)
PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(7,), (7, 8)]),
        "ignore_eos": st.booleans(),
    },
)
FILTERS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 2.0])},
    optional={
        "top_k": st.sampled_from([1, 3, VOCAB, VOCAB + 5]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.05, 0.3, 1.0]),
    },
)
ALLOWED = st.one_of(st.none(), st.frozensets(st.integers(0, VOCAB - 1), min_size=1))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(LOGITS, TOKENS, TOKENS, PENALTIES, ALLOWED), min_size=1, max_size=4))
def test_greedy_takes_the_likeliest_token_after_penalties_and_masks(rows: list[Any]) -> None:
    seqs = [
        make_seq(i, prompt=(1, *prompt), output=output, allowed=allowed, **params)
        for i, (_, prompt, output, params, allowed) in enumerate(rows)
    ]
    drawn = sample(np.stack([row[0] for row in rows]), *seqs)
    for item, seq, row in zip(drawn, seqs, rows, strict=True):
        want = oracle_logits(row[0].astype(np.float32), seq)
        assert item.error is None
        assert want[item.token_id] >= want.max() - 1e-4


@settings(max_examples=80, deadline=None)
@given(LOGITS, TOKENS, PENALTIES, FILTERS, ALLOWED, st.integers(0, 2**32))
def test_the_draw_is_the_inverse_cdf_of_the_filtered_distribution(
    logits: np.ndarray,
    output: tuple[int, ...],
    penalties: Any,
    filters: Any,
    allowed: Any,
    seed: int,
) -> None:
    seq = make_seq(3, output=output, allowed=allowed, seed=seed, **penalties, **filters)
    (item,) = sample(logits, seq)
    mass = np.cumsum(oracle_probs(logits.astype(np.float32), seq))
    key = stream_key(seed, "row-3", 0)
    target = uniforms([key], [len(output)])[0] * mass[-1]
    before = mass[item.token_id - 1] if item.token_id else 0.0
    # The oracle computes in float64: allow the draw to differ at the very edge of a token's share.
    assert before - 1e-5 <= target <= mass[item.token_id] + 1e-5


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99999])
def test_top_p_over_a_flat_distribution_looks_beyond_the_first_candidates(top_p: float) -> None:
    vocab = 5000
    logits = np.random.default_rng(0).permutation(np.linspace(0.0, 0.5, vocab))
    probs = softmax(logits.astype(np.float32).astype(np.float64))
    order = np.argsort(-probs)
    allowed = set(order[: np.searchsorted(np.cumsum(probs[order]), top_p) + 2])
    seqs = [make_seq(i, temperature=1.0, top_p=top_p) for i in range(200)]
    drawn = [item.token_id for item in sample(np.tile(logits, (200, 1)), *seqs)]
    assert set(drawn) <= allowed
    assert set(drawn) - set(order[:1000])


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the two that top_k leaves, the first has 2/3
    ],
)
def test_which_tokens_a_filter_keeps(params: dict[str, Any], support: set[int]) -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]))
    seqs = [make_seq(i, temperature=1.0, **params) for i in range(400)]
    drawn = sample(np.tile(logits, (400, 1)), *seqs)
    assert {item.token_id for item in drawn} == support


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 1000, 2048])
def test_the_draw_in_blocks_is_the_inverse_cdf(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    count = 400
    logits = rng.standard_normal((count, vocab)).astype(np.float32) * 4
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:, vocab // 2] = 0.0
    targets = rng.random(count)
    targets[:2] = 0.0, 1.0 - 2.0**-52
    drawn = filters.draw(torch.from_numpy(logits), torch.from_numpy(targets)).numpy()
    probs = torch.softmax(torch.from_numpy(logits), dim=1).double().numpy()
    mass = np.cumsum(probs, axis=1)
    rows = np.arange(count)
    assert (probs[rows, drawn] > 0).all()
    goal = targets * mass[:, -1]
    assert (mass[rows, drawn] >= goal - 1e-9).all()
    assert (mass[rows, drawn] - probs[rows, drawn] <= goal + 1e-9).all()


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.02, 0.4, 0.08, 0.2, 0.05, 0.25])
    count = 20_000
    seqs = [
        make_seq(i % 50, output=(1,) * (i // 50), temperature=1.0, max_tokens=1000)
        for i in range(count)
    ]
    tokens = [item.token_id for item in sample(np.tile(np.log(probs), (count, 1)), *seqs)]
    observed = np.bincount(tokens, minlength=6)
    chi_square = ((observed - count * probs) ** 2 / (count * probs)).sum()
    assert (
        chi_square < 20.5
    )  # 5 degrees of freedom: 0.1 % of fair samplers would fail; the seed is fixed


def test_uniforms_are_uniform_along_and_across_streams() -> None:
    keys = [stream_key(0, f"row-{i}", 0) for i in range(200)]
    grid = uniforms(np.repeat(keys, 100).tolist(), list(range(100)) * 200).reshape(200, 100)
    observed = np.histogram(grid, bins=20, range=(0.0, 1.0))[0]
    assert ((observed - 1000) ** 2 / 1000).sum() < 43.8  # 19 degrees of freedom, 0.1 %
    along = np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]
    across = np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]
    assert abs(along) < 0.03
    assert abs(across) < 0.03


def test_streams_differ_by_seed_row_and_sample_and_agree_otherwise() -> None:
    keys = {
        stream_key(seed, row, index)
        for seed in (0, 1, 10)
        for row in ("1", "11", "a")
        for index in (0, 1, 11)
    }
    assert len(keys) == 27
    assert stream_key(7, "row", 1) == stream_key(7, "row", 1)
    assert uniforms([5], [3])[0] != uniforms([5], [4])[0]


def mixed_batch(size: int = 24) -> list[Sequence]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2},
        {"temperature": 1.3, "top_k": 5, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.05, "logprobs": 2},
        {"min_tokens": 9, "frequency_penalty": 0.3},
        {"temperature": 1.0, "allowed": frozenset({1, 2, 3, 30})},
    ]
    return [
        make_seq(i, prompt=(i % 7, 3), output=tuple(range(i % 5)), **kinds[i % len(kinds)])
        for i in range(size)
    ]


@pytest.mark.parametrize("batch", [1, 2, 5, 24])
def test_c52_a_draw_depends_on_neither_batch_nor_order(batch: int) -> None:
    seqs = mixed_batch()
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((len(seqs), VOCAB)).astype(np.float32) * 3)
    want = dict(
        zip((seq.seq_id for seq in seqs), sampler().sample(DenseLogits(logits), seqs), strict=True)
    )
    order = rng.permutation(len(seqs))
    for start in range(0, len(order), batch):
        part = order[start : start + batch].tolist()
        found = sampler().sample(DenseLogits(logits[part]), [seqs[i] for i in part])
        for i, item in zip(part, found, strict=True):
            assert item.token_id == want[seqs[i].seq_id].token_id


def test_c52_the_global_random_state_is_neither_read_nor_moved() -> None:
    seqs = mixed_batch()
    logits = torch.from_numpy(
        np.random.default_rng(2).standard_normal((24, VOCAB)).astype(np.float32)
    )
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sampler().sample(DenseLogits(logits), seqs)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert sampler().sample(DenseLogits(logits), seqs) == first


def test_penalties_survive_a_suspension() -> None:
    """A sampler that saw every step agrees with one that meets the sequence in the middle."""
    rng = np.random.default_rng(3)
    params: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.4,
        "temperature": 0.8,
    }
    seq = make_seq(1, prompt=(1, 2, 3), max_tokens=200, **params)
    steady = sampler()
    for _ in range(100):
        logits = torch.from_numpy(rng.standard_normal((1, VOCAB)).astype(np.float32) * 2)
        (known,) = steady.sample(DenseLogits(logits), [seq])
        (fresh,) = sampler().sample(DenseLogits(logits), [seq])
        assert known == fresh
        seq.token_ids.append(known.token_id)


def test_a_forgotten_sequence_number_can_be_used_again() -> None:
    one = sampler()
    logits = torch.zeros((1, VOCAB))
    logits[0, 9] = 1.0
    penalised = make_seq(1, output=(9,), frequency_penalty=2.0)
    assert one.sample(DenseLogits(logits), [penalised])[0].token_id != 9
    one.forget(SeqId(1))
    one.forget(SeqId(1))
    assert one.sample(DenseLogits(logits), [make_seq(1)])[0].token_id == 9


def test_samples_of_a_row_differ_and_repeat() -> None:
    logits = np.zeros((16, VOCAB))
    seqs = [make_seq(i, name="same", sample_index=i, temperature=1.0) for i in range(16)]
    first = [item.token_id for item in sample(logits, *seqs)]
    assert len(set(first)) > 4
    assert [item.token_id for item in sample(logits, *seqs)] == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_suppresses_every_end(temperature: float) -> None:
    logits = np.full(VOCAB, -5.0)
    logits[[2, 7]] = 20.0
    logits[11] = 10.0
    params: dict[str, Any] = {"temperature": temperature, "stop_token_ids": (7,), "min_tokens": 2}
    early = make_seq(0, output=(11,), **params)
    late = make_seq(1, output=(11, 11), **params)
    free = make_seq(2, output=(11,), ignore_eos=True, **params)
    drawn = [item.token_id for item in sample(np.tile(logits, (3, 1)), early, late, free)]
    assert drawn[0] == 11
    assert drawn[1] in (2, 7)
    assert drawn[2] == 2


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 3, "top_k": 4}])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_their_row_only(params: Any, poison: float) -> None:
    logits = np.random.default_rng(4).standard_normal((3, VOCAB))
    clean = sample(logits, *(make_seq(i, **params) for i in range(3)))
    logits[1, 17] = poison
    found = sample(logits, *(make_seq(i, **params) for i in range(3)))
    assert found[1].error is not None
    assert "finite" in found[1].error
    assert (found[0], found[2]) == (clean[0], clean[2])


def test_a_row_of_nothing_but_minus_infinity_is_an_error() -> None:
    (found,) = sample(np.full(VOCAB, -np.inf), make_seq())
    assert found.error is not None


def test_single_minus_infinities_are_fine() -> None:
    logits = np.full(VOCAB, -np.inf)
    logits[4] = -3.0
    drawn = sample(np.tile(logits, (2, 1)), make_seq(0), make_seq(1, temperature=1.0))
    assert [item.token_id for item in drawn] == [4, 4]


def test_a_grammar_that_allows_nothing_is_an_error_of_its_row() -> None:
    logits = np.zeros((2, VOCAB))
    found = sample(logits, make_seq(0, allowed=frozenset()), make_seq(1, allowed=frozenset({3})))
    assert found[0].error is not None
    assert found[1].token_id == 3


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.random.default_rng(5).standard_normal(VOCAB) * 30
    (found,) = sample(logits, make_seq(temperature=temperature))
    assert found.token_id == int(np.argmax(logits))


def test_c54_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = np.random.default_rng(6).standard_normal(VOCAB)
    want = np.log(softmax(logits.astype(np.float32).astype(np.float64)))
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "presence_penalty": 1.0,
        "logprobs": 4,
    }
    (found,) = sample(logits, make_seq(output=(1, 2), **params))
    assert found.logprob == pytest.approx(want[found.token_id], abs=1e-5)
    best = np.argsort(-want)[:4]
    assert [entry.token_id for entry in found.top] == best.tolist()
    assert [entry.logprob for entry in found.top] == pytest.approx(want[best].tolist(), abs=1e-5)


def test_c54_logprobs_of_each_row_are_as_long_as_asked() -> None:
    logits = np.random.default_rng(7).standard_normal((4, VOCAB))
    asked: list[int | None] = [None, 0, 1, 20]
    found = sample(logits, *(make_seq(i, logprobs=k) for i, k in enumerate(asked)))
    assert [len(item.top) for item in found] == [0, 0, 1, 20]
    assert [item.logprob is None for item in found] == [True, False, False, False]


def test_stop_ids_outside_the_logits_do_no_harm() -> None:
    seq = make_seq(
        prompt=(5, 10_000), stop_token_ids=(10_000,), min_tokens=4, repetition_penalty=1.2
    )
    (found,) = sample(np.arange(VOCAB), seq)
    assert found.token_id == VOCAB - 1


def test_an_empty_batch_has_no_tokens() -> None:
    assert sampler().sample(DenseLogits(torch.empty((0, VOCAB))), []) == ()


def test_sampling_changes_neither_logits_nor_sequences() -> None:
    seqs = mixed_batch()
    logits = torch.from_numpy(
        np.random.default_rng(8).standard_normal((24, VOCAB)).astype(np.float32)
    )
    kept, tokens = logits.clone(), copy.deepcopy([seq.token_ids for seq in seqs])
    sampler().sample(DenseLogits(logits), seqs)
    assert torch.equal(kept, logits)
    assert [seq.token_ids for seq in seqs] == tokens


def reference_processors(
    params: dict[str, Any],
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    processors = transformers.LogitsProcessorList()
    if "repetition_penalty" in params:
        processors.append(
            transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])
        )
    processors.append(transformers.TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        processors.append(transformers.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        processors.append(transformers.TopPLogitsWarper(params["top_p"]))
    return processors


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "repetition_penalty": 1.4},
        {"temperature": 1.2, "top_k": 6},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.7, "repetition_penalty": 0.8},
    ],
)
def test_the_kept_tokens_are_those_of_transformers(params: dict[str, Any]) -> None:
    logits = np.random.default_rng(9).standard_normal(VOCAB).astype(np.float32) * 2
    prompt = (1, 8, 8, 30)
    kept = reference_processors(params)(
        torch.tensor([prompt]), torch.from_numpy(logits[None].copy())
    )
    probs = torch.softmax(kept[0], dim=0).numpy()
    seq = make_seq(prompt=prompt, **params)
    assert oracle_probs(logits, seq) == pytest.approx(probs, abs=1e-5)
    seqs = [make_seq(i, prompt=prompt, **params) for i in range(300)]
    drawn = {item.token_id for item in sample(np.tile(logits, (300, 1)), *seqs)}
    assert drawn <= set(np.flatnonzero(probs).tolist())


@pytest.mark.parametrize("num_prompt", [0, 63, 64, 127])
def test_seen_tokens_are_counted_however_many_there_are(num_prompt: int) -> None:
    """One after another, past every size at which their arrays are made larger."""
    rng = random.Random(num_prompt)
    token_ids = [rng.randrange(400) for _ in range(num_prompt)]
    seen = SeenTokens(token_ids)
    for _ in range(300):
        token_ids.append(rng.randrange(400))
        seen.update(token_ids)
        counted = Counter(token_ids[num_prompt:])
        assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == {
            token_id: counted[token_id] for token_id in dict.fromkeys(token_ids)
        }
