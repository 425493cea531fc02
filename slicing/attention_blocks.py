"""The arithmetic of attention whose rows do not depend on their neighbours: blocks of rows over blocks of keys.

A row's arithmetic is set by its position alone: queries in blocks that end at multiples of 32 positions, keys up to
the end of the block and masked, and never fewer rows in a product than agree. Everything is computed in float32.
Knows tensors only; whose they are is `attention`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slicing.row_linear import NotInvariant

BLOCK = 32  # positions
MULTIPLES = (1, 2, 4, 8, 16, 32)  # query rows of a block are filled up to one of these
MIN_PRODUCT_ROWS = 4  # fewer take the path of single rows, wherever that was looked at
TRIED_BLOCKS = (1, 2, 9)  # lengths of a trial
TRIED_MEMORY = (1, 9, 47)  # the same of an encoder's states, which all come at once
TRIED_BEGINS = (0, 1, 7, 20, 29)
TRIED_COUNTS = (*range(2, 10), 13, 17, 25, 31, 32)


@dataclass(frozen=True)
class HeadShape:
    """Sizes of one layer's attention, and how it is computed."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class Terms:
    """What a layer asks of attention besides its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]: one more logit in the softmax, with no value
    bias: torch.Tensor | None = None  # [heads, distances]: added to logits, by how far a key lies back


def find_multiple(shape: HeadShape, device: torch.device, num_blocks: Sequence[int] = TRIED_BLOCKS) -> int:
    """Return the number of query rows, as small as may be, whose multiples agree. Raises `NotInvariant`.

    Tried over so many blocks of keys.
    """
    groups = shape.heads // shape.kv_heads
    for multiple in MULTIPLES:
        if multiple * groups >= MIN_PRODUCT_ROWS and all(
            _rows_of_a_block_agree(shape, multiple, count * BLOCK, device) for count in num_blocks
        ):
            return multiple
    raise NotInvariant(f"attention with {shape} depends on the number of rows, whatever is done")


def block_mask(
    begin: int, rows: int, window: int | None, groups: int, multiple: int, device: torch.device
) -> torch.Tensor:
    """Return what is added to the logits of `rows` rows from position `begin` on: 0, or -inf for what is unseen.

    [groups * filled rows, keys]; the keys are those from `first_key` to the end of the block.
    """
    filled = rows + -rows % multiple
    places = torch.arange(begin, begin + filled).clamp(max=begin + rows - 1).unsqueeze(1)
    keys = torch.arange(first_key(begin, window), block_end(begin))
    unseen = keys > places
    if window is not None:
        unseen |= keys <= places - window
    mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
    return mask.repeat(groups, 1).to(device)


def block_bias(
    begin: int, rows: int, window: int | None, bias: torch.Tensor, kv_heads: int, multiple: int
) -> torch.Tensor:
    """Return what a bias [heads, distances] adds to the same logits [kv heads, groups * filled rows, keys]."""
    filled = rows + -rows % multiple
    places = torch.arange(begin, begin + filled).clamp(max=begin + rows - 1).unsqueeze(1)
    keys = torch.arange(first_key(begin, window), block_end(begin))
    distances = (places - keys).clamp(min=0).to(bias.device)
    return bias[:, distances].view(kv_heads, -1, len(keys))


def attend_block(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    multiple: int,
    terms: Terms,
) -> torch.Tensor:
    """Queries [heads, rows, dim], scaled; keys and values [kv heads, keys, dim]: [heads, rows, dim]."""
    heads, rows, k_dim = queries.shape
    missing = -rows % multiple
    if missing:
        queries = torch.cat([queries, queries[:, -1:].expand(heads, missing, k_dim)], dim=1)
    folded = queries.reshape(keys.shape[0], -1, k_dim)  # [kv heads, groups * filled rows, dim]
    if terms.softcap is None:
        logits = torch.baddbmm(mask, folded, keys.transpose(1, 2))
    else:
        logits = torch.bmm(folded, keys.transpose(1, 2)).div_(terms.softcap).tanh_().mul_(terms.softcap)
        logits += mask
    sinks = terms.sinks
    shares = torch.softmax(logits, dim=-1) if sinks is None else _softmax_with_sinks(logits, sinks)
    return torch.bmm(shares, values).view(heads, rows + missing, -1)[:, :rows]


def _softmax_with_sinks(logits: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax of [kv heads, groups * rows, keys] with one more logit of each head; its share is dropped."""
    kv_heads, rows, keys = logits.shape
    more = logits.new_full((kv_heads, rows, BLOCK), float("-inf"))  # keeps every row's address a multiple
    by_head = sinks.float().view(kv_heads, -1, 1)
    more[:, :, 0] = by_head.expand(-1, -1, rows // by_head.shape[1]).reshape(kv_heads, rows)
    return torch.softmax(torch.cat([logits, more], dim=-1), dim=-1)[:, :, :keys]


def blocks_of(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut positions [begin, end) at multiples of `BLOCK`."""
    while begin < end:
        stop = min(block_end(begin), end)
        yield begin, stop
        begin = stop


def block_end(position: int) -> int:
    return (position // BLOCK + 1) * BLOCK


def first_key(position: int, window: int | None) -> int:
    """Return the first key that is looked at from a position's block."""
    if window is None:
        return 0
    block_begin = position // BLOCK * BLOCK
    return max(block_begin - window + 1, 0) // BLOCK * BLOCK


def _rows_of_a_block_agree(shape: HeadShape, multiple: int, length: int, device: torch.device) -> bool:
    """Tell whether the last block of `length` positions gives every row what it gets alone."""
    generator = torch.Generator().manual_seed(shape.heads)

    def some(heads: int, rows: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, rows, dim, generator=generator).to(device)

    queries = some(shape.heads, BLOCK, shape.k_dim) * shape.k_dim**-0.5
    keys = some(shape.kv_heads, 2 * length, shape.k_dim)[:, :length]
    values = some(shape.kv_heads, 2 * length, shape.v_dim)[:, :length]

    def run(begin: int, end: int) -> torch.Tensor:
        groups = shape.heads // shape.kv_heads
        mask = block_mask(length - BLOCK + begin, end - begin, None, groups, multiple, device)
        return attend_block(queries[:, begin:end], keys, values, mask, multiple, Terms(1.0))

    alone = torch.cat([run(row, row + 1) for row in range(BLOCK)], dim=1)
    return all(
        torch.equal(run(begin, end), alone[:, begin:end])
        for begin in TRIED_BEGINS
        for end in sorted({min(begin + count, BLOCK) for count in TRIED_COUNTS})
    )
