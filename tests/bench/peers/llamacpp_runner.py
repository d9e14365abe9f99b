"""llama.cpp's low-level batched decode, continuous over its sequences, in its own environment.

Prompts of a group follow each other: the first one's prefix is computed in a sequence of its own,
and every other gets a copy of its cells.
Options: num_seqs, batch_tokens, ubatch_tokens, flash_attention (-1 lets llama.cpp choose), unified
(1: one cache for all sequences, which served it best; 0: one each).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp as lc
import numpy as np

from tests.bench.peers.protocol import Item, Settings, serve

NUM_SEQS = 64
BATCH_TOKENS = 512
MAX_TOKENS = 1280
CACHE_TYPES = {"bfloat16": 30, "float32": 0, "int8": 1}
"""Of keys and values: ggml's numbers of BF16, F32 and F16, which the package does not name."""
FILE_TYPES = {
    "bfloat16": lc.LLAMA_FTYPE_MOSTLY_BF16,
    "float32": lc.LLAMA_FTYPE_ALL_F32,
    "int8": lc.LLAMA_FTYPE_MOSTLY_Q8_0,
}


@dataclass(slots=True)
class Live:
    """A row that has a sequence of the cache: what it has computed and what it has said."""

    index: int
    item: Item
    seq: int
    num_computed: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def pending(self) -> Sequence[int]:
        """Tokens still to compute: of the prompt, else the last one said."""
        return self.item.prompt_token_ids[self.num_computed :] or self.answer[-1:]


class LlamaCppSide:
    def __init__(self, settings: Settings) -> None:
        self._num_seqs = settings.number("num_seqs", NUM_SEQS)
        self._batch_tokens = settings.number("batch_tokens", BATCH_TOKENS)
        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        self._model = lc.llama_model_load_from_file(settings.model.encode(), model_params)
        self._vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))
        self._context = lc.llama_init_from_model(self._model, self._context_params(settings))
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = lc.llama_get_memory(self._context)
        self._batch = lc.llama_batch_init(self._batch_tokens, 0, 1)
        self._prefix_seq = self._num_seqs

    def _context_params(self, settings: Settings):
        params = lc.llama_context_default_params()
        num_seqs = self._num_seqs + 1  # one more, which holds the prefix of a group
        params.n_seq_max = num_seqs
        params.n_ctx = num_seqs * settings.number("max_tokens", MAX_TOKENS)
        params.n_batch = self._batch_tokens
        params.n_ubatch = settings.number("ubatch_tokens", self._batch_tokens)
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k = params.type_v = CACHE_TYPES[settings.dtype]
        params.kv_unified = bool(settings.number("unified", 1))
        params.flash_attn_type = settings.number("flash_attention", -1)
        params.no_perf = True
        return params

    def reset(self) -> None:
        lc.llama_memory_clear(self._memory, False)

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        run = _Run(items, self._num_seqs)
        while run.is_unfinished:
            for live in run.admit():
                self._share_prefix(run, live)
            parts = list(run.parts(self._batch_tokens))
            for (live, _), token in zip(parts, self._decode(parts), strict=True):
                if token is not None:
                    live.answer.append(token)
            for live in run.retire():
                lc.llama_memory_seq_rm(self._memory, live.seq, -1, -1)
        return run.answers

    def _share_prefix(self, run: _Run, live: Live) -> None:
        """Take the prefix's cells for a new row, computing them if its group is new."""
        group, length = live.item.group, live.item.num_prefix_tokens
        if group is None:
            return
        if run.prefix_group != group:
            lc.llama_memory_seq_rm(self._memory, self._prefix_seq, -1, -1)
            owner = Live(-1, Item(live.item.prompt_token_ids[:length], 1), self._prefix_seq)
            while owner.num_computed < length:
                chunk = min(self._batch_tokens, length - owner.num_computed)
                self._decode([(owner, chunk)])
            run.prefix_group = group
        lc.llama_memory_seq_cp(self._memory, self._prefix_seq, live.seq, -1, -1)
        live.num_computed = length

    def _decode(self, parts: Sequence[tuple[Live, int]]) -> list[int | None]:
        """Compute so many tokens of each row; the next token of each whose prompt is complete."""
        batch, position, wants = self._batch, 0, []
        for live, count in parts:
            ends = live.num_computed + count >= len(live.item.prompt_token_ids)
            wants.append(ends)
            for offset, token in enumerate(live.pending[:count]):
                batch.token[position] = token
                batch.pos[position] = live.num_computed + offset
                batch.n_seq_id[position] = 1
                batch.seq_id[position][0] = live.seq
                batch.logits[position] = ends and offset == count - 1
                position += 1
            live.num_computed += count
        batch.n_tokens = position
        status = lc.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        tokens = iter(self._best(sum(wants)))
        return [next(tokens) if wanted else None for wanted in wants]

    def _best(self, count: int) -> list[int]:
        if not count:
            return []
        shape = (count, self._vocab_size)
        logits_SV = np.ctypeslib.as_array(lc.llama_get_logits(self._context), shape)
        return logits_SV.argmax(axis=1).tolist()


class _Run:
    """Which rows wait, live and are done. Decoding rows come first in a batch, prompts fill it."""

    def __init__(self, items: Sequence[Item], num_seqs: int) -> None:
        by_group = sorted(enumerate(items), key=lambda pair: pair[1].group or 0)
        self._waiting = deque(by_group)
        self._live: list[Live] = []
        self._free = list(range(num_seqs))
        self.prefix_group: int | None = None
        self.answers: list[list[int]] = [[] for _ in items]

    @property
    def is_unfinished(self) -> bool:
        return bool(self._waiting or self._live)

    def admit(self) -> Iterator[Live]:
        while self._waiting and self._free:
            index, item = self._waiting.popleft()
            live = Live(index, item, self._free.pop())
            self._live.append(live)
            yield live

    def parts(self, budget: int) -> Iterator[tuple[Live, int]]:
        for live in sorted(self._live, key=lambda live: not live.answer):
            count = min(budget, len(live.pending))
            if count:
                budget -= count
                yield live, count

    def retire(self) -> Iterator[Live]:
        for live in [one for one in self._live if len(one.answer) == one.item.num_output_tokens]:
            self._live.remove(live)
            self._free.append(live.seq)
            self.answers[live.index] = live.answer
            yield live


def convert(source: Path, target: Path, dtype: str) -> None:
    """A GGUF file in another number format."""
    params = lc.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[dtype]
    params.allow_requantize = True
    if lc.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise RuntimeError(f"llama.cpp did not convert {source}")


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        serve(LlamaCppSide)
