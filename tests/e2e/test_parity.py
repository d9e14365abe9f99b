"""Greedy float32 text equals transformers' `generate`, token for token, whatever the batching.

100 prompts of 5 to 400 tokens (log-uniform), SmolLM2-135M-Instruct, both policies, batch limits 1,
7 and 64, and KV memory so small that sequences are suspended.
"""

from __future__ import annotations

import math
import random

import pytest

from tests.e2e.parity import ours, prompts_of, reference

NUM_PROMPTS = 100
MAX_TOKENS = 8

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    from workers.errors import ModelError
    from workers.loading.files import resolve_model

    try:
        return resolve_model("smollm2")
    except ModelError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def prompts(smollm2, sample_texts):
    from workers.loading.tokenizer import Tokenizer

    rng = random.Random(11)
    lengths = [round(math.exp(rng.uniform(math.log(5), math.log(400)))) for _ in range(NUM_PROMPTS)]
    tokenizer = Tokenizer.load(smollm2)
    return prompts_of(sample_texts, tokenizer.encode_batch, lengths, seed=3)


@pytest.fixture(scope="module")
def expected(smollm2, prompts):
    return reference(smollm2.folder, prompts, MAX_TOKENS)


@pytest.fixture(scope="module")
def load(smollm2):
    from workers.backends.torch_backend import TorchBackend

    return lambda: TorchBackend.load(smollm2, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("policy", "max_seqs"),
    [
        pytest.param("hybrid", 7, marks=pytest.mark.long),
        ("hybrid", 64),
        pytest.param("exclusive", 1, marks=pytest.mark.long),
        ("exclusive", 7),
        ("mixed", 7),
        pytest.param("mixed", 64, marks=pytest.mark.long),  # hybrid takes the same steps here
    ],
)
def test_equal_for_every_policy_and_batch_limit(
    load, prompts, expected, policy: str, max_seqs: int
) -> None:
    got, _ = ours(load(), prompts, MAX_TOKENS, policy=policy, max_seqs=max_seqs, num_blocks=2000)
    assert got == expected


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_equal_when_memory_is_short(load, prompts, expected, policy: str) -> None:
    got, num_suspended = ours(
        load(), prompts, MAX_TOKENS, policy=policy, max_seqs=64, num_blocks=40
    )
    assert got == expected
    assert num_suspended > 0
