"""Reference texts by transformers' `generate`, and ours, for the greedy parity tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from schedulers.policies import make_policy
from schedulers.view import Budget
from workers.backends.base import Backend
from workers.engine import Engine, EngineConfig
from workers.request import Request, RequestId, SamplingParams, StepRecord


def prompts_of(
    texts: Sequence[str], encode, lengths: Sequence[int], *, seed: int
) -> list[list[int]]:
    """Real token ids, cut from concatenated texts at random places, one prompt a length."""
    rng = random.Random(seed)
    (stream,) = encode(["\n\n".join(texts)], add_special_tokens=False)
    starts = [rng.randrange(len(stream) - length) for length in lengths]
    return [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def reference(folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy float32 ids by transformers, one prompt at a time, until end-of-sequence or
    max_tokens.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


def ours(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    policy: str,
    max_seqs: int,
    num_blocks: int,
    max_batch_tokens: int = 256,
) -> tuple[list[list[int]], int]:
    """Greedy ids by our engine, and how often a sequence was suspended."""
    steps: list[StepRecord] = []
    engine = Engine(
        backend,
        make_policy(policy),
        EngineConfig(
            num_blocks=num_blocks,
            budget=Budget(max_batch_tokens=max_batch_tokens, max_seqs=max_seqs),
            window=len(prompts),
        ),
        on_step=steps.append,
    )
    requests = [
        Request(
            request_id=RequestId(str(row)),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        for row, prompt in enumerate(prompts)
    ]
    results = {result.request_id: result for result in engine.run(requests)}
    engine.blocks.check_integrity()
    answers = [list(results[str(row)].completions[0].token_ids) for row in range(len(prompts))]
    return answers, sum(step.num_suspended for step in steps)
