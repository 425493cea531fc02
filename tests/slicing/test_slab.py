"""The slab of a layer with a window: what it holds, what it shows, and how far it goes back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicSlidingWindowLayer

from slicing import slab
from slicing.kv_cache import CacheLayout, CannotRollBack, KVCache
from slicing.slab import MAX_STEP_ROWS, ROLLBACK_ROWS, SlabLayer, first_needed, most_held
from tests.support.families import tiny_config

HEADS, DIM, WINDOW = 2, 4, 16
POSITION_BYTES = HEADS * DIM * 4 * 2
STEPS = (1, 1, 1, 40, 1, 511, 1, 1, 512, 300, 1, 2000, 1, 7)  # one is longer than a slab has room for


def rows_at(begin: int, end: int, made: int = 0) -> torch.Tensor:
    """Rows of positions [begin, end) that tell which they are, and when they were made."""
    return (torch.arange(begin, end) + made / 64).float().view(1, 1, -1, 1).expand(1, HEADS, -1, DIM)


def new_cache() -> KVCache:
    """Of layers with a window, and of one without."""
    config = tiny_config("gemma3_text")
    assert config.layer_types[0] == config.layer_types[1] == "sliding_attention"
    assert config.layer_types[2] == "full_attention"
    return KVCache(CacheLayout.of(config))


def write(cache: KVCache, begin: int, rows: int, layers: Iterable[int] = (0,), made: int = 0) -> torch.Tensor:
    """Run a step; return the keys that the last of the layers shows, of one head."""
    keys = rows_at(begin, begin + rows, made)
    cache.begin(begin, min(layers), max(layers) + 1)
    shown = [cache.update(keys, -keys, layer)[0] for layer in layers]
    cache.finish(begin + rows, min(layers), max(layers) + 1)
    return shown[-1][0, 0, :, 0]


def steps(total: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for rows in cycle(STEPS):
        if begin >= total:
            return
        yield begin, rows
        begin += rows


def slab_of(cache: KVCache, layer: int = 0) -> SlabLayer:
    found = cache.layers[layer]
    assert isinstance(found, SlabLayer)
    return found


def test_attention_sees_what_the_stock_layer_shows_however_often_the_slab_moved_on() -> None:
    cache, stock = new_cache(), DynamicSlidingWindowLayer(sliding_window=WINDOW)
    bases = set()
    for begin, rows in steps(12_000):
        keys = rows_at(begin, begin + rows)
        cache.begin(begin, 0, 1)
        assert cache.get_mask_sizes(rows, 0) == stock.get_mask_sizes(rows)
        for mine, theirs in zip(cache.update(keys, -keys, 0), stock.update(keys, -keys), strict=True):
            assert torch.equal(mine, theirs)
        cache.finish(begin + rows, 0, 1)
        bases.add(slab_of(cache).base)
    assert len(bases) > 10


def test_memory_stops_growing_where_a_layer_has_a_window() -> None:
    cache = new_cache()
    for begin, rows in steps(12_000):
        write(cache, begin, rows, (0, 2))
        assert slab_of(cache, 0).size_bytes <= most_held(WINDOW) * POSITION_BYTES
    assert slab_of(cache, 2).size_bytes >= 12_000 * POSITION_BYTES
    assert most_held(WINDOW) <= WINDOW + ROLLBACK_ROWS + MAX_STEP_ROWS + 3 * 64
    assert cache.position_bytes == {WINDOW: POSITION_BYTES, None: POSITION_BYTES}


def test_a_step_of_usual_length_never_takes_more() -> None:
    cache = new_cache()
    keys = rows_at(0, MAX_STEP_ROWS)
    for number in range(20):
        cache.begin(number * MAX_STEP_ROWS, 0, 1)
        cache.update(keys, keys, 0)
        assert slab_of(cache).capacity <= most_held(WINDOW)
        cache.finish((number + 1) * MAX_STEP_ROWS, 0, 1)


def test_single_rows_move_a_slab_once_in_hundreds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    shift = slab._shift

    def counted(tensor: torch.Tensor, first: int, rows: int) -> None:
        moved.append(rows)
        shift(tensor, first, rows)

    monkeypatch.setattr(slab, "_shift", counted)
    cache = new_cache()
    for position in range(4000):
        write(cache, position, 1)
    assert 0 < len(moved) <= 2 * 4000 // MAX_STEP_ROWS
    assert max(moved) <= WINDOW + ROLLBACK_ROWS + 64


def test_a_window_goes_back_by_256_rows_and_no_further_than_it_holds() -> None:
    cache = new_cache()
    for begin, rows in steps(5000):
        write(cache, begin, rows, (0, 1, 2))
    length = cache.length
    cache.truncate(length - ROLLBACK_ROWS)
    at = cache.length
    shown = write(cache, at, 2, (0, 1, 2))
    assert shown.tolist() == [float(position) for position in range(at + 2)]  # of the layer that sees all
    assert write(cache, at, 2).tolist() == [float(position) for position in range(at - WINDOW + 1, at + 2)]
    before = [(layer.length, layer.base) for layer in cache.layers if isinstance(layer, SlabLayer)]
    with pytest.raises(CannotRollBack, match="precedes position 900"):
        cache.truncate(900)
    with pytest.raises(CannotRollBack, match="precedes position 900"):
        cache.begin(900, 0, 3)
    assert before == [(layer.length, layer.base) for layer in cache.layers if isinstance(layer, SlabLayer)]
    assert cache.length == at + 2


def test_a_session_that_cannot_go_back_starts_again_at_0() -> None:
    for restart in (lambda cache: cache.truncate(0), lambda cache: None):
        cache = new_cache()
        write(cache, 0, 3000)
        restart(cache)
        assert write(cache, 0, 5, made=1).tolist() == rows_at(0, 5, made=1)[0, 0, :, 0].tolist()
        assert cache.length == slab_of(cache).length == 5


def test_a_step_that_failed_midway_is_computed_again_at_the_same_position() -> None:
    cache, keys = new_cache(), rows_at(2000, 4000)
    for begin in range(0, 2000, 500):
        write(cache, begin, 500, (0, 1))
    cache.begin(2000, 0, 2)
    cache.update(keys, -keys, 0)  # and no further
    seen = write(cache, 2000, 2000, (0, 1))
    assert seen.tolist() == [float(position) for position in range(2000 - WINDOW + 1, 4000)]
    assert slab_of(cache).capacity == most_held(WINDOW)


@pytest.mark.parametrize("back", [0, 1, ROLLBACK_ROWS])
def test_a_fork_goes_on_as_its_origin_and_holds_no_more(back: int) -> None:
    cache = new_cache()
    for begin, rows in steps(3000):
        write(cache, begin, rows, (0, 1, 2))
    at = cache.length - back
    assert cache.can_fork(at)
    other = cache.fork(at)
    assert slab_of(other).size_bytes <= slab_of(cache).size_bytes
    kept = slab_of(cache).held(at - WINDOW, at)[0].clone()
    for position in range(at, at + 1000):
        seen = write(other, position, 1, made=1)
        places = torch.arange(position - WINDOW + 1, position + 1)
        assert torch.equal(seen, places + (places >= at) / 64)
    assert torch.equal(slab_of(cache).held(at - WINDOW, at)[0], kept)


def test_a_fork_of_what_a_window_let_go_is_refused() -> None:
    cache = new_cache()
    for begin in range(0, 3000, 500):
        write(cache, begin, 500, (0, 1, 2))
    assert not cache.can_fork(1000)
    with pytest.raises(CannotRollBack):
        cache.fork(1000)
    assert cache.can_fork(0)
    assert cache.can_fork(3000 - ROLLBACK_ROWS)
    assert cache.fork(0).length == 0


def test_layers_of_two_ends_are_counted_apart() -> None:
    cache = new_cache()
    for begin in range(0, 3000, 500):
        write(cache, begin, 500, (0,))
        if begin >= 1500:
            write(cache, begin - 1500, 500, (1,))
    assert slab_of(cache, 1).length == 1500
    assert write(cache, 1500, 1, (1,)).tolist() == [float(position) for position in range(1485, 1501)]


@pytest.mark.parametrize("window", [1, 2, 16, 33, 500])
def test_blocks_of_32_positions_are_held_whole(window: int) -> None:
    """What attention by blocks looks at from any position that may be gone on at."""
    for position in range(2000):
        block = position // 32 * 32
        looked_at = max(block - window + 1, 0) // 32 * 32
        first = first_needed(position, window)
        assert first <= looked_at
        assert first % 32 == 0
        assert position - first <= window + 63


def test_what_is_forgotten_is_blanked_wherever_the_slab_begins() -> None:
    cache = new_cache()
    for position in range(0, 3000, 300):
        write(cache, position, 300)
    layer = slab_of(cache)
    assert layer.base > 0
    layer.truncate(2900)
    layer.blank(2912)
    assert (layer.held(2900, 2912)[0] == 0).all()
    assert layer.held(2900 - WINDOW, 2900)[0][0, 0, :, 0].tolist() == [
        *map(float, range(2900 - WINDOW, 2900))
    ]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "back", "fork"]), st.integers(1, 700)),
    min_size=5,
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_a_slab_shows_what_was_written(actions: list[tuple[str, int]]) -> None:
    cache, written, most = new_cache(), torch.empty(0), 0  # most: positions held since the slab was new
    for number, (action, amount) in enumerate(actions):
        at = max(len(written) - amount, 0)
        if action == "step":
            rows = rows_at(len(written), len(written) + amount, number)[0, 0, :, 0]
            written = torch.cat([written, rows])
            seen = write(cache, len(written) - amount, amount, made=number)
            assert torch.equal(seen, written[-len(seen) :])
            most = max(most, len(written))
            assert len(seen) == min(len(written), amount + WINDOW - 1)
        elif not cache.can_fork(at):
            assert most - at > ROLLBACK_ROWS
            with pytest.raises(CannotRollBack):
                cache.truncate(at)
        else:
            written = written[:at]
            if action == "fork":
                cache = cache.fork(at)
            else:
                cache.truncate(at)
    assert slab_of(cache).capacity <= most_held(WINDOW)
