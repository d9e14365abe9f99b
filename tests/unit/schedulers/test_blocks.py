"""Laws of the block table: random operations against recomputation, sharing, eviction order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.blocks import BlockAccountingError, BlockManager, blocks_for
from schedulers.view import SeqId

SIZE = 4


@pytest.fixture
def blocks():
    manager = BlockManager(8, SIZE, max_cached_blocks=8)
    yield manager
    manager.check_integrity()


def fill(blocks: BlockManager, seq: int, tokens: list[int]) -> int:
    """Open, grow, seal: what the engine does for a whole prompt. Returns the cached tokens."""
    cached = blocks.open(SeqId(seq), tokens)
    blocks.grow(SeqId(seq), len(tokens))
    blocks.seal(SeqId(seq), tokens, len(tokens))
    return cached


def test_a_table_covers_exactly_its_positions(blocks: BlockManager) -> None:
    for num_tokens in range(1, 17):
        blocks.open(SeqId(num_tokens), [num_tokens] * num_tokens)
        blocks.grow(SeqId(num_tokens), num_tokens)
        assert len(blocks.table(SeqId(num_tokens))) == blocks_for(num_tokens, SIZE)
        blocks.close(SeqId(num_tokens))
    assert blocks.num_free_blocks == 8


def test_an_equal_prefix_is_shared_by_whole_blocks_and_never_to_the_last_token(
    blocks: BlockManager,
) -> None:
    assert fill(blocks, 0, [1, 2, 3, 4, 5, 6, 7, 8]) == 0
    # The same eight tokens: only the first block, as the last token's logits are needed.
    assert fill(blocks, 1, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert fill(blocks, 2, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert blocks.table(SeqId(2))[:2] == blocks.table(SeqId(0))[:2]
    assert blocks.private_blocks(SeqId(2)) == 1


def test_equal_tokens_behind_unequal_prefixes_are_not_shared(blocks: BlockManager) -> None:
    fill(blocks, 0, [1, 1, 1, 1, 5, 5, 5, 5])
    assert fill(blocks, 1, [2, 2, 2, 2, 5, 5, 5, 5, 6]) == 0


def test_content_survives_its_holder_until_the_memory_is_needed(blocks: BlockManager) -> None:
    fill(blocks, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    blocks.close(SeqId(0))
    assert blocks.num_free_blocks == 8
    match = blocks.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (match.num_tokens, match.num_revived_blocks) == (8, 2)
    fill(blocks, 1, list(range(100, 132)))  # the whole pool
    assert blocks.match([1, 2, 3, 4, 5]) == []


def test_children_are_evicted_before_their_parents(blocks: BlockManager) -> None:
    fill(blocks, 0, list(range(12)))
    blocks.close(SeqId(0))
    blocks.open(SeqId(1), [99])
    blocks.grow(SeqId(1), 6 * SIZE)  # five free blocks and one cached
    assert blocks.match_prefix([*range(12), 0]).num_tokens == 8


def test_no_more_is_kept_than_allowed() -> None:
    blocks = BlockManager(8, SIZE, max_cached_blocks=1)
    fill(blocks, 0, list(range(12)))
    blocks.close(SeqId(0))
    blocks.check_integrity()
    assert blocks.match_prefix([*range(12), 0]).num_tokens == SIZE
    assert blocks.num_free_blocks == 8


def test_a_prefix_that_was_shared_outlives_what_never_was() -> None:
    """Eight tokens that two rows begin with stay, whatever comes through after them."""
    blocks = BlockManager(16, SIZE, max_cached_blocks=8, max_unmatched_blocks=3)
    shared = list(range(8))
    for seq, tail in ((0, [50, 51, 52, 53]), (1, [60, 61, 62, 63])):
        fill(blocks, seq, [*shared, *tail])
        blocks.close(SeqId(seq))
    for seq in range(2, 30):
        fill(blocks, seq, [1000 * seq + index for index in range(16)])
        blocks.close(SeqId(seq))
        blocks.check_integrity()
        assert blocks.match_prefix([*shared, 0]).num_tokens == 8
    assert blocks.match_prefix([1000 * 29 + index for index in range(17)]).num_tokens == 3 * SIZE
    assert blocks.match_prefix([1000 * 28 + index for index in range(17)]).num_tokens == 0


def test_even_a_shared_prefix_goes_when_the_memory_is_needed(blocks: BlockManager) -> None:
    for seq in (0, 1):
        fill(blocks, seq, [*range(8), 50 + seq])
        blocks.close(SeqId(seq))
    fill(blocks, 2, list(range(100, 132)))  # the whole pool
    assert blocks.match_prefix([*range(8), 0]).num_tokens == 0


def test_asking_for_more_than_there_is_is_an_error(blocks: BlockManager) -> None:
    blocks.open(SeqId(0), [1])
    with pytest.raises(BlockAccountingError, match="all 8 blocks"):
        blocks.grow(SeqId(0), 9 * SIZE)


def test_a_holder_cannot_open_twice(blocks: BlockManager) -> None:
    blocks.open(SeqId(0), [1])
    with pytest.raises(BlockAccountingError, match="holds blocks already"):
        blocks.open(SeqId(0), [1])


def test_without_sharing_nothing_is_kept() -> None:
    blocks = BlockManager(8, SIZE, share_prefixes=False)
    fill(blocks, 0, [1, 2, 3, 4, 5])
    assert fill(blocks, 1, [1, 2, 3, 4, 5]) == 0
    blocks.check_integrity()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_operations_keep_every_law_and_serve_only_equal_content(data: st.DataObject) -> None:
    """Against a model: what each block holds. A match must return exactly the tokens asked for."""
    blocks = BlockManager(
        10,
        SIZE,
        max_cached_blocks=data.draw(st.integers(0, 10)),
        max_unmatched_blocks=data.draw(st.integers(0, 10)),
    )
    content: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix up to and with the block
    alive: dict[int, list[int]] = {}
    for seq in range(data.draw(st.integers(1, 25))):
        if alive and data.draw(st.booleans()):
            blocks.close(SeqId(alive_id := data.draw(st.sampled_from(sorted(alive)))))
            del alive[alive_id]
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
        match = blocks.match_prefix(tokens)
        need = blocks_for(len(tokens), SIZE) - match.num_tokens // SIZE + match.num_revived_blocks
        if need > blocks.num_free_blocks:
            continue
        cached = blocks.open(SeqId(seq), tokens)
        assert cached == match.num_tokens
        for index, block in enumerate(blocks.table(SeqId(seq))):
            assert content[block] == tuple(tokens[: (index + 1) * SIZE])
        blocks.grow(SeqId(seq), len(tokens))
        for index, block in enumerate(blocks.table(SeqId(seq))):
            content[block] = tuple(tokens[: (index + 1) * SIZE])
        blocks.seal(SeqId(seq), tokens, len(tokens))
        alive[seq] = tokens
        blocks.check_integrity()
    for seq in alive:
        blocks.close(SeqId(seq))
    blocks.check_integrity()
    assert blocks.num_free_blocks == 10
