"""The arithmetic of sampling, on all rows of a batch at once.

Shapes: S sequences, V vocabulary, N entries of a sparse list, K candidates, B blocks. Every
function works row by row, so a row's result does not depend on its neighbours. Logits are float32
and dropped tokens are -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_FIRST_CANDIDATES = 256
_BLOCK = 256


def penalise(
    logits_SV: Tensor,
    *,
    rows_N: Tensor,
    ids_N: Tensor,
    counts_N: Tensor,
    repetition_S: Tensor,
    presence_S: Tensor,
    frequency_S: Tensor,
) -> None:
    """Apply penalties in place: repetition first, then frequency and presence.

    Args:
        logits_SV: changed.
        rows_N: with `ids_N`, the distinct tokens of each row's prompt and output.
        ids_N: see `rows_N`.
        counts_N: how often each is in the output (0: only in the prompt).
        repetition_S: divides positive and multiplies negative logits.
        presence_S: subtracted where the count is above 0.
        frequency_S: subtracted times the count.
    """
    score_N = logits_SV[rows_N, ids_N]
    repetition_N = repetition_S[rows_N]
    score_N = torch.where(score_N > 0, score_N / repetition_N, score_N * repetition_N)
    score_N -= frequency_S[rows_N] * counts_N
    score_N -= presence_S[rows_N] * (counts_N > 0)
    logits_SV[rows_N, ids_N] = score_N


def mask_disallowed(logits_SV: Tensor, bitmask_SW: Tensor) -> None:
    """Drop, in place, the tokens whose bit is 0. `bitmask_SW` is int32, token t in bit t % 32 of
    word t // 32.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask_SW.device)
    bits_SV = ((bitmask_SW[:, :, None] >> shifts) & 1).flatten(1)[:, : logits_SV.shape[1]]
    logits_SV.masked_fill_(bits_SV == 0, float("-inf"))


def likeliest(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and logits of the likeliest tokens, shape (S,) each; the first of equals. NaN wins, if
    any.
    """
    if logits_SV.device.type == "cpu":  # NumPy's argmax is several times faster there
        ids_S = torch.from_numpy(logits_SV.numpy().argmax(axis=1))
    else:
        ids_S = logits_SV.argmax(dim=1)
    return ids_S, logits_SV.gather(1, ids_S[:, None])[:, 0]


def scale(logits_SV: Tensor, temperature_S: Tensor) -> None:
    """Divide by the temperature, in place, with the likeliest token at 0: nothing overflows."""
    logits_SV.sub_(logits_SV.amax(dim=1, keepdim=True)).div_(temperature_S[:, None])


def keep_min_p(logits_SV: Tensor, min_p_S: Tensor) -> Tensor:
    """Drop tokens below `min_p` times the probability of the likeliest one."""
    floor_S1 = logits_SV.amax(dim=1, keepdim=True) + torch.log(min_p_S)[:, None]
    return logits_SV.masked_fill(logits_SV < floor_S1, float("-inf"))


def keep_top_k(logits_SV: Tensor, top_k_S: Tensor) -> Tensor:
    """Drop tokens below the k-th largest logit. Ties with it stay. Each k is between 1 and V."""
    values_SK = torch.topk(logits_SV, int(top_k_S.max()), dim=1).values
    floor_S1 = values_SK.gather(1, top_k_S[:, None] - 1)
    return logits_SV.masked_fill(logits_SV < floor_S1, float("-inf"))


def keep_top_p(logits_SV: Tensor, top_p_S: Tensor) -> Tensor:
    """Keep the fewest likeliest tokens with at least `top_p` of the mass: the one that crosses it
    stays, and ties with it.
    """
    probs_SV = torch.softmax(logits_SV, dim=1)
    floor_S = _crossing(probs_SV, top_p_S, min(_FIRST_CANDIDATES, probs_SV.shape[1]))
    return logits_SV.masked_fill(probs_SV < floor_S[:, None], float("-inf"))


def _crossing(probs_SV: Tensor, top_p_S: Tensor, num_candidates: int) -> Tensor:
    """The probability at which the sorted mass reaches top_p. Looks at the likeliest tokens first,
    as a sort of all is slow.
    """
    values_SK = torch.topk(probs_SV, num_candidates, dim=1).values
    mass_SK = torch.cumsum(values_SK, dim=1, dtype=torch.float64)
    rank_S = (mass_SK < top_p_S[:, None]).sum(dim=1)
    floor_S = values_SK.gather(1, rank_S.clamp(max=num_candidates - 1)[:, None])[:, 0]
    short_S = rank_S == num_candidates
    if num_candidates < probs_SV.shape[1] and bool(short_S.any()):
        more = min(num_candidates * 16, probs_SV.shape[1])
        floor_S[short_S] = _crossing(probs_SV[short_S], top_p_S[short_S], more)
    return floor_S


def draw(logits_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """One token a row by inverse CDF in vocabulary order: the first whose cumulative mass exceeds
    `uniform_S` (float64, in [0, 1)) of the whole.

    In two levels, first over blocks of the vocabulary and then inside one, as a cumulative sum over
    all of it is much slower.
    """
    probs_SV = torch.softmax(logits_SV, dim=1)
    padding = -probs_SV.shape[1] % _BLOCK
    probs_SBK = functional.pad(probs_SV, (0, padding)).unflatten(1, (-1, _BLOCK))
    mass_SB = torch.cumsum(probs_SBK.sum(dim=2, dtype=torch.float64), dim=1)
    target_S1 = uniform_S[:, None] * mass_SB[:, -1:]
    block_S1 = torch.searchsorted(mass_SB, target_S1, right=True)
    before_S1 = functional.pad(mass_SB, (1, 0)).gather(1, block_S1)
    inside_SK = probs_SBK[torch.arange(len(probs_SBK), device=block_S1.device), block_S1[:, 0]]
    mass_SK = torch.cumsum(inside_SK, dim=1, dtype=torch.float64)
    offset_S1 = torch.searchsorted(mass_SK, target_S1 - before_S1, right=True)
    # The two sums may differ in their last bit: stay inside the block, on a token with some mass.
    places_K = torch.arange(_BLOCK, device=block_S1.device)
    last_S1 = torch.where(inside_SK > 0, places_K, 0).amax(dim=1, keepdim=True)
    return (block_S1 * _BLOCK + torch.minimum(offset_S1, last_S1))[:, 0]
