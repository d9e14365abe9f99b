"""The sides of the throughput benchmark: a workload goes in, a measurement comes out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from tests.bench.common import Item, Measurement, Workload
from workers.loading.files import ModelFiles
from workers.request import Request, RequestId, SamplingParams
from workers.setup import EngineOptions, make_engine

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from workers.engine import Engine

Order = Literal["arrival", "sorted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Generated ids by index of the workload's item, to see that both sides did the same work."""

    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)


class TransformersSide:
    """Greedy `generate` over static, left-padded batches.

    Each batch runs until its longest answer is complete; only the tokens asked for are counted.
    """

    def __init__(self, folder: Path, *, dtype: str, batch_size: int = 16) -> None:
        from transformers import AutoModelForCausalLM

        self.batch_size = batch_size
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()
        config = self._model.generation_config
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        # Lengths are forced: nothing ends a sequence early, and no processor is paid for it.
        config.eos_token_id = None
        config.pad_token_id = pad
        self._pad = pad

    def run(self, workload: Workload, order: Order) -> tuple[Measurement, Answers]:
        answers = Answers()
        started = time.perf_counter()
        for indices in self._batches(workload, order):
            items = [workload.items[index] for index in indices]
            for index, ids in zip(indices, self._generate(items), strict=True):
                answers.token_ids[index] = ids
        elapsed_s = time.perf_counter() - started
        measurement = Measurement(
            side=f"transformers, {order}",
            elapsed_s=elapsed_s,
            num_output_tokens=sum(map(len, answers.token_ids.values())),
        )
        return measurement, answers

    def _batches(self, workload: Workload, order: Order) -> Iterator[Sequence[int]]:
        indices = list(range(len(workload.items)))
        if order == "sorted":
            indices.sort(key=lambda index: len(workload.items[index].prompt_token_ids))
        for start in range(0, len(indices), self.batch_size):
            yield indices[start : start + self.batch_size]

    @torch.inference_mode()
    def _generate(self, items: Sequence[Item]) -> list[tuple[int, ...]]:
        longest = max(len(item.prompt_token_ids) for item in items)
        num_new = max(item.num_output_tokens for item in items)
        ids_BT = torch.full((len(items), longest), self._pad)
        mask_BT = torch.zeros_like(ids_BT)
        for row, item in enumerate(items):
            ids_BT[row, longest - len(item.prompt_token_ids) :] = torch.tensor(
                item.prompt_token_ids
            )
            mask_BT[row, longest - len(item.prompt_token_ids) :] = 1
        out_BT = self._model.generate(
            ids_BT, attention_mask=mask_BT, max_new_tokens=num_new, do_sample=False
        )
        new = out_BT[:, longest:].tolist()
        return [tuple(row[: item.num_output_tokens]) for row, item in zip(new, items, strict=True)]


class OurSide:
    """Our engine, all requests offered at once, in order of arrival.

    Each run has a fresh engine, so that no run finds the prompts of an earlier one in KV memory.
    """

    def __init__(self, files: ModelFiles, *, dtype: str, policy: str = "hybrid") -> None:
        self._files = files
        self._dtype = dtype
        self._policy = policy

    def run(self, workload: Workload) -> tuple[Measurement, Answers]:
        engine = self._engine()
        started = time.perf_counter()
        results = list(engine.run(forced_request(*pair) for pair in enumerate(workload.items)))
        elapsed_s = time.perf_counter() - started
        engine.backend.close()
        answers = Answers(
            token_ids={int(item.request_id): item.completions[0].token_ids for item in results}
        )
        measurement = Measurement(
            side="headrace",
            elapsed_s=elapsed_s,
            num_output_tokens=sum(map(len, answers.token_ids.values())),
            details={
                "policy": self._policy,
                "num_blocks": engine.config.num_blocks,
                "num_suspensions": sum(item.num_suspensions for item in results),
                "num_cached_tokens": sum(item.num_cached_tokens for item in results),
            },
        )
        return measurement, answers

    def _engine(self) -> Engine:
        from workers.backends.torch_backend import TorchBackend

        backend = TorchBackend.load(
            self._files, device="cpu", dtype=self._dtype, deterministic=False
        )
        options = EngineOptions(policy=self._policy)
        engine, _ = make_engine(backend, options, clock=time.perf_counter)
        return engine


def forced_request(index: int, item: Item) -> Request:
    """Greedy, with exactly the workload's number of tokens."""
    num_tokens = item.num_output_tokens
    return Request(
        request_id=RequestId(str(index)),
        prompt_token_ids=item.prompt_token_ids,
        sampling=SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True),
    )


def agreement(left: Answers, right: Answers, *, num_tokens: int) -> float:
    """Share of rows whose first tokens are equal: evidence that both sides did the same."""
    rows = left.token_ids.keys() | right.token_ids.keys()
    same = sum(
        left.token_ids[row][:num_tokens] == right.token_ids[row][:num_tokens] for row in rows
    )
    return same / len(rows)
