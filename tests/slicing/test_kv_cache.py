"""The key/value storage of one session."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from slicing.kv_cache import MIN_CAPACITY, CacheLayout, CannotRollBack, KVCache
from tests.support.families import NUM_LAYERS, tiny_config

HEADS, DIM = 2, 16


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))


def new_cache(family: str = "llama") -> KVCache:
    return KVCache(CacheLayout.of(tiny_config(family)))


def write(cache: KVCache, layer: int, position: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cache.begin(position, layer, layer + 1)
    seen = cache.update(rows, -rows, layer)
    cache.finish(position + rows.shape[2], layer, layer + 1)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_sees_what_the_stock_cache_shows(family: str) -> None:
    config, cache = tiny_config(family), new_cache(family)
    stock = DynamicCache(config=config)
    position = 0
    for count in (9, 20, 1, 1, 40, 1):
        rows = rows_of(count, seed=position)
        cache.begin(position, 0, 1)
        assert cache.get_mask_sizes(count, 0) == stock.get_mask_sizes(count, 0)
        for mine, theirs in zip(write(cache, 0, position, rows), stock.update(rows, -rows, 0), strict=True):
            assert torch.equal(mine, theirs)
        position += count


def test_lengths_come_from_the_session_where_the_first_layers_are_not_held() -> None:
    cache = new_cache()
    write(cache, 4, 0, rows_of(7))
    cache.begin(7, 4, 5)
    assert cache.get_seq_length() == 7
    assert cache.get_mask_sizes(2, 0) == (9, 0)
    assert cache.length == 7


def test_only_layers_that_ran_take_memory_and_it_doubles() -> None:
    cache = new_cache()
    assert cache.size_bytes == 0
    write(cache, 3, 0, rows_of(5))
    one = HEADS * DIM * 4 * 2
    assert cache.size_bytes == MIN_CAPACITY * one
    write(cache, 3, 5, rows_of(MIN_CAPACITY))
    assert cache.size_bytes == 2 * MIN_CAPACITY * one
    assert cache.position_bytes == {None: one}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_truncated_session_goes_on_as_if_the_rest_had_never_been(family: str) -> None:
    cache, fresh = new_cache(family), new_cache(family)
    write(fresh, 0, 0, rows_of(30))
    write(cache, 0, 0, rows_of(30))
    write(cache, 0, 30, rows_of(50, seed=1))
    cache.truncate(30)
    assert cache.length == 30
    for mine, theirs in zip(
        write(cache, 0, 30, rows_of(2, 2)), write(fresh, 0, 30, rows_of(2, 2)), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_fork_goes_on_as_the_session_would_and_leaves_it_alone(family: str) -> None:
    cache, fresh = new_cache(family), new_cache(family)
    write(fresh, 0, 0, rows_of(30))
    write(cache, 0, 0, rows_of(30))
    write(cache, 0, 30, rows_of(50, seed=1))
    other = cache.fork(30)
    seen = write(other, 0, 30, rows_of(2, seed=2))
    for mine, theirs in zip(seen, write(fresh, 0, 30, rows_of(2, seed=2)), strict=True):
        assert torch.equal(mine, theirs)
    assert (cache.length, other.length) == (80, 32)
    write(fresh, 0, 30, rows_of(50, seed=1))
    for mine, theirs in zip(write(cache, 0, 80, rows_of(1)), write(fresh, 0, 80, rows_of(1)), strict=True):
        assert torch.equal(mine, theirs)


def test_a_fork_holds_no_more_than_it_was_asked_for() -> None:
    cache = new_cache()
    write(cache, 2, 0, rows_of(3 * MIN_CAPACITY))
    assert cache.fork(5).size_bytes == cache.size_bytes // 4
    assert cache.fork(0).size_bytes == 0
    assert not cache.can_fork(3 * MIN_CAPACITY + 1)
    with pytest.raises(ValueError, match="holds 192"):
        cache.fork(3 * MIN_CAPACITY + 1)


def test_a_running_state_is_forked_where_it_stands_only() -> None:
    cache = new_cache("lfm2")
    cache.begin(0, 0, 1)
    cache.update_conv_state(torch.ones(1, 8, 3), 0)
    cache.finish(4, 0, 1)
    assert [length for length in range(5) if cache.can_fork(length)] == [0, 4]
    with pytest.raises(CannotRollBack, match="layer 0"):
        cache.fork(3)
    other = cache.fork(4)
    other.begin(4, 0, 1)
    other.update_conv_state(torch.zeros(1, 8, 3), 0)
    assert (cache.get_conv_state(0) == 1).all()


def test_what_is_forgotten_can_be_blanked() -> None:
    cache = new_cache()
    write(cache, 0, 0, rows_of(40))
    cache.truncate(30)
    layer = cache.layers[0]
    layer.blank(64)
    assert (layer.keys[:, :, 30:] == 0).all()
    assert torch.equal(layer.keys[:, :, :30], rows_of(40)[:, :, :30])


def test_truncating_forwards_and_leaving_a_gap_are_errors() -> None:
    cache = new_cache()
    write(cache, 0, 0, rows_of(3))
    with pytest.raises(ValueError, match="holds 3"):
        cache.truncate(4)
    cache.begin(5, 0, 1)
    with pytest.raises(ValueError, match="gap"):
        cache.update(rows_of(1), rows_of(1), 0)


def test_closing_frees_everything() -> None:
    cache = new_cache()
    write(cache, 0, 0, rows_of(3))
    cache.close()
    assert (cache.size_bytes, cache.length) == (0, 0)


def test_a_running_state_goes_forward_or_back_to_the_start_only() -> None:
    cache = new_cache("lfm2")
    cache.begin(0, 0, 1)
    cache.update_conv_state(torch.ones(1, 8, 3), 0)
    cache.finish(4, 0, 1)
    with pytest.raises(CannotRollBack, match="layer 0"):
        cache.truncate(2)
    cache.truncate(0)
    assert cache.get_conv_state(0) is None


def test_a_step_that_failed_midway_leaves_no_running_state_to_build_on() -> None:
    cache = new_cache("lfm2")
    cache.begin(0, 0, NUM_LAYERS)
    with pytest.raises(CannotRollBack):
        cache.begin(3, 0, NUM_LAYERS)
    cache.begin(0, 0, NUM_LAYERS)


def test_the_representation_shows_sizes_only() -> None:
    cache = new_cache()
    write(cache, 0, 0, rows_of(3))
    assert repr(cache) == f"KVCache(length=3, size_bytes={cache.size_bytes})"
