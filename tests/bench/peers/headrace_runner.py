"""Our engine, all requests offered at once in order of arrival, in the project's own environment.

Options: policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.bench.peers.protocol import Item, Settings, serve
from workers.backends.torch_backend import TorchBackend
from workers.loading.files import resolve_model
from workers.request import Request, RequestId, SamplingParams
from workers.setup import EngineOptions, make_engine, size_engine


class HeadraceSide:
    """Each run has a new engine, so that none finds the prompts of an earlier one."""

    def __init__(self, settings: Settings) -> None:
        self._backend = TorchBackend.load(
            resolve_model(settings.model),
            device="cpu",
            dtype=settings.dtype,  # type: ignore[arg-type]
        )
        memory = size_engine(self._backend.info, EngineOptions()).memory
        self._options = EngineOptions(
            policy=settings.options.get("policy", EngineOptions().policy),
            memory_bytes=memory.weights_bytes + memory.activation_bytes + settings.kv_bytes,
        )
        self._engine = self._new_engine()
        self._used = False

    def _new_engine(self):
        return make_engine(self._backend, self._options, clock=time.perf_counter).engine

    def reset(self) -> None:
        if self._used:
            self._engine = self._new_engine()
        self._used = True

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        answers: dict[int, list[int]] = {}
        for result in self._engine.run(map(forced_request, range(len(items)), items)):
            answers[int(result.request_id)] = list(result.completions[0].token_ids)
        return [answers[index] for index in range(len(items))]


def forced_request(index: int, item: Item) -> Request:
    """Greedy, with exactly the workload's number of tokens."""
    num_tokens = item.num_output_tokens
    return Request(
        request_id=RequestId(str(index)),
        prompt_token_ids=item.prompt_token_ids,
        sampling=SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True),
    )


if __name__ == "__main__":
    serve(HeadraceSide)
