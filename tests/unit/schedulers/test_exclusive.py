"""The threshold of exclusive batching, and its switching rule."""

from __future__ import annotations

from dataclasses import dataclass

from schedulers.crossover import refill_size
from schedulers.estimate import Estimator
from schedulers.policies.exclusive import Exclusive
from schedulers.view import Budget, PrefixMatch, SeqId, View


@dataclass
class Seq:
    seq_id: SeqId
    num_prompt_tokens: int = 8
    num_tokens: int = 8
    num_computed_tokens: int = 0
    max_total_tokens: int = 16
    admission: int = -1


def decoding(seq_id: int) -> Seq:
    return Seq(SeqId(seq_id), num_tokens=9, num_computed_tokens=8)


def view(*, running: int, waiting: int, free: int = 1000) -> View:
    return View(
        waiting=[Seq(SeqId(100 + i)) for i in range(waiting)],
        running=[decoding(i) for i in range(running)],
        num_free_blocks=free,
        num_blocks=1000,
        block_size=4,
        match_prefix=lambda _: PrefixMatch(0, 0),
        private_blocks=lambda _: 3,
        input_exhausted=False,
        now_s=0.0,
    )


BUDGET = Budget(max_batch_tokens=64, max_seqs=10)


def test_it_prefills_to_the_full_number_then_decodes_until_k_have_finished() -> None:
    policy = Exclusive(Estimator(cold_mean_output_tokens=4))
    k = refill_size(10, 1 / 4, switch_s=1.0, alpha_d=1.0, beta_d=1 / 128)
    assert 1 < k < 9
    assert policy.plan(view(running=0, waiting=20), BUDGET).phase == "prefill"
    for num_finished in range(10):
        plan = policy.plan(view(running=10 - num_finished, waiting=20), BUDGET)
        expect = "prefill" if num_finished >= k else "decode"
        assert plan.phase == expect, num_finished
        if expect == "prefill":
            break
    assert num_finished == k


def test_under_light_load_it_refills_at_once() -> None:
    policy = Exclusive(Estimator(cold_mean_output_tokens=128))
    policy.plan(view(running=2, waiting=0), BUDGET)
    assert policy.plan(view(running=1, waiting=9), BUDGET).phase == "prefill"


def test_the_kv_gate_keeps_it_decoding_when_nothing_could_be_admitted() -> None:
    policy = Exclusive(Estimator(cold_mean_output_tokens=4))
    policy.plan(view(running=2, waiting=0), BUDGET)
    assert policy.plan(view(running=2, waiting=9, free=1), BUDGET).phase == "decode"
    assert policy.plan(view(running=2, waiting=9, free=900), BUDGET).phase == "prefill"
