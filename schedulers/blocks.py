"""KV memory counted in blocks: who holds which, what is shared, what may be reused.

Whose truth: this table says which blocks a sequence *may write and read*; the tensors in `workers`
hold what was written. A block is in exactly one of three states:

    free        no holder, no content worth keeping
    cached      no holder, content known by its key: may be revived by a match, or evicted
    held        `_holders[block] >= 1` sequences have it in their tables

What has been matched before is likely to be matched again, and what has not rarely is: a prefix
that rows share is kept, and the rest of a prompt goes first (and soon, so that the pool's untouched
memory stays untouched). Within both the least recently freed goes first.

Only *full* blocks of known content are ever shared, and a full block is never written again, so
copy-on-write does not arise: a fork or a prefix match shares the full blocks and computes the
partial one anew (less than one block of work).

Keys are a trie, not hashes, so a collision cannot serve another row's text: the key of a block is
(serial of the parent block's content, the block's token ids), and a serial is never used twice.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from schedulers.view import PrefixMatch, SeqId

_ROOT = 0


class BlockKey(NamedTuple):
    """Content of a full block in its context: equal keys, equal keys and values.

    The token ids are packed (4 bytes each): a pool's worth of keys stays small.
    """

    parent_serial: int
    packed_token_ids: bytes


def _pack(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


class BlockAccountingError(Exception):
    """A caller asked for what its plan did not have, or the table is inconsistent. Always a bug,
    never a user's fault.
    """


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` positions occupy."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Owner of the block tables. Pure bookkeeping; not thread-safe.

    Args:
        num_blocks: blocks in the pool.
        block_size: positions per block.
        share_prefixes: whether full prompt blocks are kept and matched.
        max_cached_blocks: blocks without a holder that are kept for a match; by default a quarter
            of the pool, and no more than 8192.
        max_unmatched_blocks: how many of them may be such as never were matched; by default 1024.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        share_prefixes: bool = True,
        max_cached_blocks: int | None = None,
        max_unmatched_blocks: int = 1024,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks is {num_blocks} and block_size {block_size}; both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.max_cached_blocks = (
            min(-(-num_blocks // 4), 8192) if max_cached_blocks is None else max_cached_blocks
        )
        self.max_unmatched_blocks = min(max_unmatched_blocks, self.max_cached_blocks)
        # A stack: what was freed last is warm in the caches, and untouched memory stays untouched.
        self._free: list[int] = list(reversed(range(num_blocks)))
        self._unmatched: OrderedDict[int, None] = OrderedDict()
        self._matched: OrderedDict[int, None] = OrderedDict()
        self._was_matched: list[bool] = [False] * num_blocks
        self._holders: list[int] = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._serial: list[int] = [_ROOT] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._tables: dict[SeqId, list[int]] = {}
        self._num_sealed: dict[SeqId, int] = {}
        self._next_serial = _ROOT + 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out now: free and cached ones."""
        return len(self._free) + self._num_cached

    def table(self, seq_id: SeqId) -> Sequence[int]:
        """Block numbers of a holder, in order of position. A live view: do not change it."""
        return self._tables[seq_id]

    def tables(self) -> Mapping[SeqId, Sequence[int]]:
        """All holders. A live view."""
        return self._tables

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the longest known prefix, never its last token (whose logits are
        needed).
        """
        found: list[int] = []
        if not self.share_prefixes:
            return found
        size = self.block_size
        serial = _ROOT
        for start in range(0, len(token_ids) - size, size):
            block = self._block_of.get(BlockKey(serial, _pack(token_ids[start : start + size])))
            if block is None:
                break
            found.append(block)
            serial = self._serial[block]
        return found

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:
        """What `open` would find now. A pure look-up."""
        found = self.match(token_ids)
        revived = sum(1 for block in found if self._holders[block] == 0)
        return PrefixMatch(len(found) * self.block_size, revived, self._next_key(found, token_ids))

    def _next_key(self, found: Sequence[int], token_ids: Sequence[int]) -> BlockKey | None:
        """Of the whole block behind a match, if it could be shared."""
        start, size = len(found) * self.block_size, self.block_size
        if not self.share_prefixes or start + size >= len(token_ids):
            return None
        serial = self._serial[found[-1]] if found else _ROOT
        return BlockKey(serial, _pack(token_ids[start : start + size]))

    def private_blocks(self, seq_id: SeqId) -> int:
        """Blocks that no other holder shares: what `close` would free."""
        return sum(1 for block in self._tables[seq_id] if self._holders[block] == 1)

    def open(self, seq_id: SeqId, token_ids: Sequence[int]) -> int:
        """Make a sequence a holder; shares the longest known prefix. Returns the number of tokens
        that it brings.
        """
        if seq_id in self._tables:
            raise BlockAccountingError(
                f"sequence {seq_id} holds blocks already: {self._tables[seq_id]}"
            )
        table = self.match(token_ids)
        for block in table:
            self._revive(block)
        self._tables[seq_id] = table
        self._num_sealed[seq_id] = len(table)
        return len(table) * self.block_size

    def grow(self, seq_id: SeqId, num_tokens: int) -> Sequence[int]:
        """Make a holder's table cover `num_tokens` positions, and return it (a live view).

        Raises:
            BlockAccountingError: not enough blocks; plans must not get here.
        """
        table = self._tables[seq_id]
        while len(table) * self.block_size < num_tokens:
            block = self._take()
            self._holders[block] = 1
            table.append(block)
        return table

    def seal(self, seq_id: SeqId, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the full computed blocks of a holder known, so that others can share them."""
        if not self.share_prefixes:
            return
        table, size = self._tables[seq_id], self.block_size
        done = self._num_sealed[seq_id]
        serial = self._serial[table[done - 1]] if done else _ROOT
        for index in range(done, num_computed_tokens // size):
            block = table[index]
            key = BlockKey(serial, _pack(token_ids[index * size : (index + 1) * size]))
            known = self._block_of.get(key)
            if known is None:
                self._block_of[key] = block
                self._key[block] = key
                self._serial[block] = self._next_serial
                self._next_serial += 1
                known = block
            elif known != block:
                # The same content twice: ours stays private, and everything behind it too, as its
                # parent has no serial.
                return
            serial = self._serial[known]
            self._num_sealed[seq_id] = index + 1

    def close(self, seq_id: SeqId) -> None:
        """Give a holder's blocks back; known ones stay cached until they are needed."""
        table = self._tables.pop(seq_id)
        del self._num_sealed[seq_id]
        # Tail first, so that a child is evicted before its parent and no cached block is ever
        # unreachable.
        for block in reversed(table):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._cache_of(block)[block] = None
        while (
            len(self._unmatched) > self.max_unmatched_blocks
            or self._num_cached > self.max_cached_blocks
        ):
            self._free.append(self._evict())

    @property
    def _num_cached(self) -> int:
        return len(self._unmatched) + len(self._matched)

    def _cache_of(self, block: int) -> OrderedDict[int, None]:
        return self._matched if self._was_matched[block] else self._unmatched

    def _revive(self, block: int) -> None:
        """One holder more, by a match."""
        if self._holders[block] == 0:
            del self._cache_of(block)[block]
        self._was_matched[block] = True
        self._holders[block] += 1

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._num_cached:
            raise BlockAccountingError(
                f"all {self.num_blocks} blocks are held by {len(self._tables)} sequences"
            )
        return self._evict()

    def _evict(self) -> int:
        """Forget the content of the cached block that was freed first, unmatched ones before."""
        cache = self._unmatched or self._matched
        block, _ = cache.popitem(last=False)
        self._was_matched[block] = False
        key = self._key[block]
        assert key is not None
        del self._block_of[key]
        self._key[block] = None
        self._serial[block] = _ROOT
        return block

    def check_integrity(self) -> None:
        """Recompute every redundant field from the tables.

        Raises:
            BlockAccountingError: naming the first field that differs.
        """
        holders = [0] * self.num_blocks
        for table in self._tables.values():
            for block in table:
                holders[block] += 1
        free, cached = set(self._free), {*self._unmatched, *self._matched}
        known = {block: key for block, key in enumerate(self._key) if key is not None}
        laws: tuple[tuple[str, bool], ...] = (
            ("holders are what the tables say", holders == self._holders),
            ("no block is free twice", len(free) == len(self._free)),
            ("free and cached are apart", not free & cached),
            (
                "free, cached and held make the pool",
                len(free) + len(cached) + sum(map(bool, holders)) == self.num_blocks,
            ),
            (
                "free and cached blocks have no holder",
                not any(holders[block] for block in free | cached),
            ),
            (
                "cached blocks lie with their kind",
                not any(self._was_matched[block] for block in self._unmatched)
                and all(self._was_matched[block] for block in self._matched),
            ),
            ("cached blocks are known", cached <= set(known)),
            ("free blocks are unknown", not free & set(known)),
            (
                "the index is the inverse of the keys",
                {key: block for block, key in known.items()} == self._block_of,
            ),
            (
                "no sequence holds a block twice",
                all(len(set(t)) == len(t) for t in self._tables.values()),
            ),
        )
        for law, holds in laws:
            if not holds:
                raise BlockAccountingError(
                    f"broken: {law}; tables {self._tables}, holders {self._holders}"
                )
