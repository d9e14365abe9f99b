"""`BatchSampler`: one token for each row of logits, by each row's own sampling parameters.

The order of operations is: raw log-probabilities (as reported), penalties, grammar and minimum
length, then for rows with a temperature temperature, min_p, top_k, top_p and the draw. Rows that
need no more than the likeliest token, nearly all in most jobs, take one maximum over the batch; the
rest are gathered into sub-batches by what they need, so nothing loops over rows with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schedulers.view import SeqId
from workers.request import Sampled, SamplingParams, TokenLogprob
from workers.sampling import filters
from workers.sampling.logits import Logits
from workers.sampling.seen import SeenTokens
from workers.sampling.streams import stream_key, uniforms
from workers.sequence import Sequence


@dataclass(slots=True)
class _Row:
    """What the sampler keeps of a sequence. All of it can be made again from the sequence."""

    params: SamplingParams
    key: int
    penalised: bool
    plain: bool
    """Always the likeliest token, nothing more to do (after `min_tokens`, if any)."""
    seen: SeenTokens | None = None


class BatchSampler:
    """Samples for the sequences of one engine.

    Keeps a little state per sequence (the key of its random stream, counts of its tokens), which is
    derived from the sequence alone: after a suspension, or in another process, it comes out the
    same.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        """`vocab_size` is the width of the logits; ids beyond it in stop lists are ignored."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._rows: dict[SeqId, _Row] = {}

    def sample(self, logits: Logits, seqs: Seq[Sequence]) -> tuple[Sampled, ...]:
        """Draw the token that follows each sequence's known tokens.

        Args:
            logits: of len(seqs) rows, on the sampler's device.
            seqs: the sequences, in the order of the rows. Not changed.

        Returns:
            One `Sampled` a sequence. `error` is set where the logits hold NaN or +inf or nothing
            finite, or where a grammar leaves no token.
        """
        if not seqs:
            return ()
        rows = [self._row(seq) for seq in seqs]
        chosen_S, best_S = logits.likeliest()
        special = [
            i
            for i, (row, seq) in enumerate(zip(rows, seqs, strict=True))
            if not self._is_plain(row, seq)
        ]
        finite = torch.isfinite(best_S).tolist()
        special = [i for i in special if finite[i]]
        alive = dict.fromkeys(special, True)
        if special:
            taken, ok = self._sample_special(logits, [rows[i] for i in special], seqs, special)
            chosen_S = chosen_S.index_copy(0, self._index(special), taken)
            alive = dict(zip(special, ok, strict=True))
        tokens: list[int] = chosen_S.tolist()
        logprobs = self._logprobs(logits, chosen_S, rows, finite)
        return tuple(
            _result(i, tokens[i], finite[i], alive.get(i, True), logprobs) for i in range(len(seqs))
        )

    def forget(self, seq_id: SeqId) -> None:
        """Drop what is kept of a sequence that ended."""
        self._rows.pop(seq_id, None)

    def _row(self, seq: Sequence) -> _Row:
        row = self._rows.get(seq.seq_id)
        if row is None:
            row = self._rows[seq.seq_id] = _new_row(seq)
        return row

    def _sample_special(
        self, all_logits: Logits, rows: Seq[_Row], all_seqs: Seq[Sequence], special: Seq[int]
    ) -> tuple[Tensor, list[bool]]:
        """Tokens of the rows `special`, and for each whether there was one to choose."""
        seqs = [all_seqs[i] for i in special]
        logits = all_logits.rows(self._index(special))
        self._penalise(logits, rows, seqs)
        self._mask_grammars(logits, seqs)
        self._suppress_ends(logits, seqs)
        chosen, best = filters.likeliest(logits)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            index = self._index(drawn)
            some = logits.index_select(0, index)
            taken = self._draw(some, [rows[i] for i in drawn], [seqs[i] for i in drawn])
            chosen = chosen.index_copy(0, index, taken)
        return chosen, torch.isfinite(best).tolist()

    def _penalise(self, logits: Tensor, rows: Seq[_Row], seqs: Seq[Sequence]) -> None:
        """Gather the distinct tokens of all penalised rows into one sparse update."""
        seen = [
            (i, _seen(row, seq))
            for i, (row, seq) in enumerate(zip(rows, seqs, strict=True))
            if row.penalised
        ]
        if not seen:
            return
        owners = np.repeat([i for i, _ in seen], [len(tokens.ids) for _, tokens in seen])
        ids = np.concatenate([tokens.ids for _, tokens in seen])
        counts = np.concatenate([tokens.counts for _, tokens in seen])
        inside = ids < self._vocab_size
        filters.penalise(
            logits,
            rows_N=torch.from_numpy(owners[inside]).to(self._device),
            ids_N=torch.from_numpy(ids[inside]).to(self._device),
            counts_N=torch.from_numpy(counts[inside]).to(self._device),
            repetition_S=self._column(rows, lambda params: params.repetition_penalty),
            presence_S=self._column(rows, lambda params: params.presence_penalty),
            frequency_S=self._column(rows, lambda params: params.frequency_penalty),
        )

    def _mask_grammars(self, logits: Tensor, seqs: Seq[Sequence]) -> None:
        guided = [(i, seq.matcher) for i, seq in enumerate(seqs) if seq.matcher is not None]
        if not guided:
            return
        bitmask = torch.zeros((len(guided), -(-self._vocab_size // 32)), dtype=torch.int32)
        for slot, (_, matcher) in enumerate(guided):
            matcher.fill_mask(bitmask, slot)
        index = self._index([i for i, _ in guided])
        some = logits.index_select(0, index)
        filters.mask_disallowed(some, bitmask.to(self._device))
        logits.index_copy_(0, index, some)

    def _suppress_ends(self, logits: Tensor, seqs: Seq[Sequence]) -> None:
        """Before `min_tokens`, drop the ids that would end the sample. A grammar decides about its
        own end.
        """
        ends = [
            (i, token_id)
            for i, seq in enumerate(seqs)
            if _is_too_short(seq) and seq.matcher is None
            for token_id in self._ends(seq)
            if 0 <= token_id < self._vocab_size
        ]
        if ends:
            pairs = torch.tensor(ends, device=self._device)
            logits[pairs[:, 0], pairs[:, 1]] = float("-inf")

    def _is_plain(self, row: _Row, seq: Sequence) -> bool:
        return row.plain and not (_is_too_short(seq) and self._ends(seq))

    def _ends(self, seq: Sequence) -> frozenset[int]:
        eos = frozenset[int]() if seq.request.sampling.ignore_eos else self._eos_token_ids
        return seq.stop_ids | eos

    def _draw(self, logits: Tensor, rows: Seq[_Row], seqs: Seq[Sequence]) -> Tensor:
        """Draw for rows of `logits`, which is changed."""
        filters.scale(logits, self._column(rows, lambda params: params.temperature))
        for applies, value, keep in _FILTERS:
            some = [i for i, row in enumerate(rows) if applies(row.params, self._vocab_size)]
            if some:
                index = self._index(some)
                column = torch.tensor([value(rows[i].params) for i in some], device=self._device)
                logits = logits.index_copy(0, index, keep(logits.index_select(0, index), column))
        numbers = uniforms([row.key for row in rows], [seq.num_output_tokens for seq in seqs])
        return filters.draw(logits, torch.from_numpy(numbers).to(self._device))

    def _logprobs(
        self, logits: Logits, chosen_S: Tensor, rows: Seq[_Row], finite: Seq[bool]
    ) -> Mapping[int, tuple[float, tuple[TokenLogprob, ...]]]:
        """Log-probabilities of the raw distribution, by row, for the rows that want them."""
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and finite[i]]
        if not wanted:
            return {}
        index = self._index(wanted)
        some = torch.log_softmax(logits.rows(index), dim=1)
        chosen = some.gather(1, chosen_S.index_select(0, index)[:, None])[:, 0].tolist()
        most = min(max(rows[i].params.logprobs or 0 for i in wanted), self._vocab_size)
        values, ids = torch.topk(some, most, dim=1)
        found: dict[int, tuple[float, tuple[TokenLogprob, ...]]] = {}
        for i, own, row_ids, row_values in zip(
            wanted, chosen, ids.tolist(), values.tolist(), strict=True
        ):
            pairs = zip(row_ids, row_values, strict=True)
            top = tuple(TokenLogprob(*pair) for pair in pairs)
            found[i] = own, top[: rows[i].params.logprobs or 0]
        return found

    def _index(self, items: Seq[int]) -> Tensor:
        return torch.tensor(items, dtype=torch.int64, device=self._device)

    def _column(self, rows: Seq[_Row], value: Callable[[SamplingParams], float]) -> Tensor:
        values = [value(row.params) for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=self._device)


_FILTERS: tuple[
    tuple[
        Callable[[SamplingParams, int], bool],
        Callable[[SamplingParams], float],
        Callable[[Tensor, Tensor], Tensor],
    ],
    ...,
] = (
    (lambda params, _: params.min_p > 0.0, lambda params: params.min_p, filters.keep_min_p),
    (
        lambda params, vocab: 0 < params.top_k < vocab,
        lambda params: params.top_k,
        filters.keep_top_k,
    ),
    (lambda params, _: params.top_p < 1.0, lambda params: params.top_p, filters.keep_top_p),
)
"""When a filter applies, the parameter it takes, and the filter, in order of application."""


def _new_row(seq: Sequence) -> _Row:
    params = seq.request.sampling
    penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
        1.0,
        0.0,
        0.0,
    )
    return _Row(
        params=params,
        key=stream_key(params.seed, seq.request.request_id, seq.sample_index),
        penalised=penalised,
        plain=params.greedy and not penalised and seq.request.grammar is None,
    )


def _is_too_short(seq: Sequence) -> bool:
    return seq.num_output_tokens < seq.request.sampling.min_tokens


def _seen(row: _Row, seq: Sequence) -> SeenTokens:
    if row.seen is None or row.seen.num_tokens > seq.num_tokens:
        row.seen = SeenTokens(seq.token_ids[: seq.num_prompt_tokens])
    row.seen.update(seq.token_ids)
    return row.seen


def _result(
    i: int,
    token_id: int,
    finite: bool,
    chosen: bool,
    logprobs: Mapping[int, tuple[float, tuple[TokenLogprob, ...]]],
) -> Sampled:
    if not finite:
        return Sampled(token_id, error="the model's logits are not finite (NaN or infinite)")
    if not chosen:
        return Sampled(
            token_id, error="no token may follow: the grammar or the penalties exclude all of them"
        )
    logprob, top = logprobs.get(i, (None, ()))
    return Sampled(token_id, logprob, top)
