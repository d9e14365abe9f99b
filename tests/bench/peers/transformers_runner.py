"""transformers' `generate` over static batches, or its continuous batching, in its own environment.

Static batches are left-padded, of prompts sorted by length (faster than in order of arrival); each
runs until its longest answer is complete, and only the tokens asked for count.
Options: mode (static or continuous), batch_size; num_blocks, max_batch_tokens, page_size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from tests.bench.peers.protocol import Item, Settings, Side, serve

BATCH_SIZE = 16
KV_BYTES_PER_ELEMENT = {"bfloat16": 2, "float32": 4}
RESULT_TIMEOUT_S = 60.0


def load(settings: Settings) -> Side:
    torch.set_num_threads(settings.threads)
    continuous = settings.options.get("mode") == "continuous"
    return ContinuousSide(settings) if continuous else StaticSide(settings)


def load_model(settings: Settings):
    """A model whose answers nothing ends early, and no processor is paid for it."""
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
    ).eval()
    config = model.generation_config
    config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else 0
    config.eos_token_id = None
    return model


class StaticSide:
    def __init__(self, settings: Settings) -> None:
        self._model = load_model(settings)
        self._pad = self._model.generation_config.pad_token_id
        self._batch_size = settings.number("batch_size", BATCH_SIZE)

    def reset(self) -> None:
        pass

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        answers: dict[int, list[int]] = {}
        for indices in self._batches(items):
            found = self._generate([items[index] for index in indices])
            answers.update(zip(indices, found, strict=True))
        return [answers[index] for index in range(len(items))]

    def _batches(self, items: Sequence[Item]) -> Iterator[list[int]]:
        order = sorted(range(len(items)), key=lambda index: len(items[index].prompt_token_ids))
        for start in range(0, len(order), self._batch_size):
            yield order[start : start + self._batch_size]

    @torch.inference_mode()
    def _generate(self, items: Sequence[Item]) -> list[list[int]]:
        longest = max(len(item.prompt_token_ids) for item in items)
        ids_BT = torch.full((len(items), longest), self._pad)
        mask_BT = torch.zeros_like(ids_BT)
        for row, item in enumerate(items):
            start = longest - len(item.prompt_token_ids)
            ids_BT[row, start:] = torch.tensor(item.prompt_token_ids)
            mask_BT[row, start:] = 1
        out_BT = self._model.generate(
            ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=max(item.num_output_tokens for item in items),
            do_sample=False,
        )
        new = out_BT[:, longest:].tolist()
        return [row[: item.num_output_tokens] for row, item in zip(new, items, strict=True)]


class ContinuousSide:
    """A manager serves one run: its cache holds the prefixes of all that it has seen."""

    def __init__(self, settings: Settings) -> None:
        self._model = load_model(settings)
        page_size = settings.number("page_size", 32)
        self._sizes = {
            "page_size": page_size,
            "num_blocks": settings.number("num_blocks", self._num_blocks(settings, page_size)),
            "max_batch_tokens": settings.number("max_batch_tokens", 512),
        }
        self._sharing = settings.prefix_caching

    def _num_blocks(self, settings: Settings, page_size: int) -> int:
        config = self._model.config
        elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return settings.kv_bytes // (elements * KV_BYTES_PER_ELEMENT[settings.dtype] * page_size)

    def reset(self) -> None:
        pass

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=self._model.generation_config.pad_token_id,
                max_new_tokens=max(item.num_output_tokens for item in items),
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                allow_block_sharing=self._sharing, **self._sizes
            ),
        )
        manager.start()
        try:
            return self._collect(manager, items)
        finally:
            manager.stop(block=True)

    def _collect(self, manager, items: Sequence[Item]) -> list[list[int]]:
        for index, item in enumerate(items):
            manager.add_request(
                list(item.prompt_token_ids),
                request_id=str(index),
                max_new_tokens=item.num_output_tokens,
                eos_token_id=-1,
            )
        answers: dict[int, list[int]] = {}
        while len(answers) < len(items):
            result = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if result.is_finished():
                answers[int(result.request_id)] = list(result.generated_tokens)
        return [answers[index] for index in range(len(items))]


if __name__ == "__main__":
    serve(load)
