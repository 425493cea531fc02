"""Keys and values caught at the attention call: whose they are, what they take, and when they are let go."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from slicing.diffusion.arguments import Layout, Rows
from slicing.diffusion.attention_watch import Site, Watch
from slicing.diffusion.kept import (
    KeptKeys,
    KeysDiffer,
    NoRoomForKeys,
    StaleKeys,
    is_close,
    kept_bytes,
    tolerance_of,
)
from slicing.diffusion.patches import Cut

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 12, 4
GRID = (1, 4, 3)


def parts(tokens: int = TOKENS, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, HEADS, tokens, WIDTH, generator=draw) for _ in range(3)]


def rows_of(index: int, of: int = 2) -> Rows:
    """The rows of a patch of a single stream."""
    return Layout(0, TOKENS).rows(Cut(GRID, index, of))


def attend(watch: Watch, query: Any, key: Any, value: Any, block: int = 0, **options: Any) -> torch.Tensor:
    """What a block's one attention gives while it is watched."""
    with watch.block(block):
        return F.scaled_dot_product_attention(query, key, value, **options)


def keys_of(*seeds: int, **options: Any) -> KeptKeys:
    """Keys and values kept of whole passes, one after the other."""
    kept = KeptKeys(frozenset({TOKENS}), **options)
    for seed in seeds:
        attend(kept.record(), *parts(seed=seed))
    return kept


def patch_of(whole: list[torch.Tensor], index: int, of: int = 2) -> list[torch.Tensor]:
    """The rows of a patch."""
    return [part[..., rows_of(index, of).rows, :] for part in whole]


def over(query: torch.Tensor, *tokens: list[torch.Tensor]) -> torch.Tensor:
    """What queries give over the keys and values of several patches, by plain matrix products."""
    key = torch.cat([part[1] for part in tokens], 2)
    value = torch.cat([part[2] for part in tokens], 2)
    return torch.softmax(query @ key.mT / WIDTH**0.5, -1) @ value


def test_recording_changes_nothing_and_sees_sites_only() -> None:
    kept = KeptKeys(frozenset({TOKENS}))
    query, key, value = parts()
    watch = kept.record()
    with watch.block(7):
        text = F.scaled_dot_product_attention(query, key[:, :, :5], value[:, :, :5])
        picture = F.scaled_dot_product_attention(query, key, value)
    assert kept.sites == {Site(7, 1)}
    assert torch.equal(picture, F.scaled_dot_product_attention(query, key, value))
    assert torch.equal(text, F.scaled_dot_product_attention(query, key[:, :, :5], value[:, :, :5]))


def test_other_threads_are_not_watched() -> None:
    kept = KeptKeys(frozenset({TOKENS}))
    with kept.record().block(0):
        other = threading.Thread(target=lambda: F.scaled_dot_product_attention(*parts()))
        other.start()
        other.join()
    assert not kept.sites


def test_a_patch_attends_to_fresh_earlier_patches_and_stale_later_ones() -> None:
    kept = keys_of(0)
    old, new = parts(seed=0), parts(seed=1)
    for index in range(3):
        rows = rows_of(index, 3)
        got = attend(kept.patch(rows), *patch_of(new, index, 3))
        kept.finish_patch(rows)
        fresh = [patch_of(new, earlier, 3) for earlier in range(index + 1)]
        stale = [patch_of(old, later, 3) for later in range(index + 1, 3)]
        assert torch.allclose(got, over(patch_of(new, index, 3)[0], *fresh, *stale), atol=1e-6)


def test_half_extrapolation_moves_stale_keys_and_no_fresh_ones() -> None:
    kept = keys_of(0, 1, extrapolate=True)
    before, last, new = parts(seed=0), parts(seed=1), parts(seed=2)
    guess = [one + 0.5 * (one - earlier) for one, earlier in zip(last, before, strict=True)]
    first = attend(kept.patch(rows_of(0), 0.5), *patch_of(new, 0))
    assert torch.allclose(first, over(patch_of(new, 0)[0], patch_of(new, 0), patch_of(guess, 1)), atol=1e-6)
    kept.finish_patch(rows_of(0))
    second = attend(kept.patch(rows_of(1), 0.5), *patch_of(new, 1))
    assert torch.allclose(second, over(patch_of(new, 1)[0], patch_of(new, 0), patch_of(new, 1)), atol=1e-6)


def test_extrapolation_goes_on_from_step_to_step() -> None:
    kept = keys_of(0, 1, extrapolate=True)
    steps = [parts(seed=seed) for seed in range(4)]
    for now in (2, 3):
        kept.begin_step()
        for index in (0, 1):
            got = attend(kept.patch(rows_of(index), 0.5), *patch_of(steps[now], index))
            kept.finish_patch(rows_of(index))
            if index == 0:
                last, before = steps[now - 1], steps[now - 2]
                guess = [one + 0.5 * (one - earlier) for one, earlier in zip(last, before, strict=True)]
                wanted = over(patch_of(steps[now], 0)[0], patch_of(steps[now], 0), patch_of(guess, 1))
                assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("extrapolate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_formula_says(extrapolate: bool, dtype: torch.dtype) -> None:
    kept = KeptKeys(frozenset({TOKENS}), extrapolate=extrapolate)
    for block in range(5):
        fused = torch.randn(
            BATCH, TOKENS, 3 * HEADS * WIDTH, dtype=dtype
        )  # as models make them: views of one tensor
        attend(
            kept.record(),
            *(p.unflatten(2, (HEADS, WIDTH)).mT.mT.transpose(1, 2) for p in fused.chunk(3, 2)),
            block,
        )
    wanted = kept_bytes(
        TOKENS, HEADS * WIDTH, itemsize=dtype.itemsize, num_blocks=5, batch=BATCH, extrapolate=extrapolate
    )
    assert kept.size_bytes == wanted
    held = [kept.kept_at(site) for site in kept.sites]
    assert all(one is not None and one.key.untyped_storage().nbytes() == one.key.nbytes for one in held)


def test_bfloat16_takes_four_bytes_a_token_and_width() -> None:
    assert kept_bytes(75600, 5120, itemsize=2) == 4 * 75600 * 5120


def test_what_is_closed_is_freed() -> None:
    kept = keys_of(0)
    held = kept.kept_at(Site(0, 0))
    assert held is not None
    key = weakref.ref(held.key)
    del held
    kept.close()
    gc.collect()
    assert (key(), kept.size_bytes) == (None, 0)
    with pytest.raises(StaleKeys, match="must be whole"):
        kept.patch(rows_of(0))


def test_memory_beyond_the_limit_is_not_taken() -> None:
    of_one = kept_bytes(TOKENS, HEADS * WIDTH, itemsize=4, batch=BATCH)
    kept = KeptKeys(frozenset({TOKENS}), limit_bytes=of_one)
    watch = kept.record()
    for block in range(3):
        assert torch.equal(attend(watch, *parts(), block), F.scaled_dot_product_attention(*parts()))
    assert isinstance(watch.failure, NoRoomForKeys)
    assert (watch.needed_bytes, kept.size_bytes) == (3 * of_one, 0)


def test_keys_that_did_not_change_are_noticed() -> None:
    kept = keys_of(0)
    watch = kept.record()
    attend(watch, *parts(seed=0))
    attend(watch, *parts(seed=1), block=1)
    assert watch.unchanged == {Site(0, 0)}


def test_what_is_dropped_is_computed_by_every_patch_itself() -> None:
    kept = keys_of(0)
    kept.drop_sites({Site(0, 0)})
    attend(kept.record(), *parts(seed=1))
    assert not kept.sites


def test_the_check_changes_nothing_that_is_kept() -> None:
    kept = keys_of(0)
    got = attend(kept.check(rows_of(1)), *patch_of(parts(seed=0), 1))
    assert torch.allclose(got, over(*patch_of(parts(seed=0), 1)[:1], parts(seed=0)), atol=1e-6)
    with pytest.raises(KeysDiffer, match="not those of the whole pass"):
        attend(kept.check(rows_of(1)), *patch_of(parts(seed=1), 1))
    held = kept.kept_at(Site(0, 0))
    assert held is not None
    assert torch.equal(held.key, parts(seed=0)[1])


def test_the_check_finds_keys_that_come_from_text() -> None:
    kept = keys_of(0)
    watch = kept.check(rows_of(0))
    query, key, value = parts()
    attend(watch, query[:, :, rows_of(0).rows], key, value)
    assert watch.text_sites == {Site(0, 0)}


def test_causal_attention_is_refused() -> None:
    with pytest.raises(KeysDiffer, match="causal"):
        attend(keys_of(0).patch(rows_of(0)), *patch_of(parts(), 0), is_causal=True)


def test_a_mask_of_all_queries_is_cut_to_the_patch() -> None:
    mask = torch.randn(TOKENS, TOKENS)
    kept = KeptKeys(frozenset({TOKENS}))
    whole = attend(kept.record(), *parts(), attn_mask=mask)
    got = attend(kept.patch(rows_of(1)), *patch_of(parts(), 1), attn_mask=mask)
    assert torch.allclose(got, whole[:, :, rows_of(1).rows], atol=1e-6)


def test_a_mask_made_for_the_patchs_keys_becomes_the_whole_passs() -> None:
    mask = torch.arange(TOKENS).remainder(3).bool().view(1, 1, 1, TOKENS)
    kept = KeptKeys(frozenset({TOKENS}))
    whole = attend(kept.record(), *parts(), attn_mask=mask)
    ours = mask[..., rows_of(1).rows]
    got = attend(kept.patch(rows_of(1)), *patch_of(parts(), 1), attn_mask=ours)
    assert torch.allclose(got, whole[:, :, rows_of(1).rows], atol=1e-6)
    with pytest.raises(KeysDiffer, match="mask"):
        attend(kept.patch(rows_of(1)), *patch_of(parts(), 1), attn_mask=~ours)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_close(odd: float) -> None:
    ones = torch.ones(4)
    assert is_close(ones + 5e-5, ones)
    assert not is_close(ones + 5e-4, ones)
    assert not is_close(torch.full((4,), odd), ones)
    assert not is_close(torch.full((4,), odd), torch.full((4,), odd))


def test_half_types_are_given_what_they_cannot_resolve() -> None:
    assert tolerance_of(torch.float32) == 1e-4
    assert 1e-2 < tolerance_of(torch.bfloat16) < 5e-2
