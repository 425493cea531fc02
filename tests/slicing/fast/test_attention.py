"""Attention over pages: against plain float64, and its bits against every way in which rows can come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicing.fast.execute import StepWork, Workspace
from slicing.fast.pages import PAGE, KVLayout, LayerKV, PagedCache, PagePool
from slicing.fast.program import Columns, ProgramBuilder
from tests.slicing.fast.steps import Array, bits, digest, normal, patterned, run


@dataclass(frozen=True)
class Kind:
    """What one attention layer is like."""

    heads: int = 6
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def sinks(self) -> Array | None:
        return normal(self.heads, seed=99) if self.has_sinks else None


class Layer:
    """One layer as a program over [q | k | v] columns; and sessions in its pages."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        layout = KVLayout([LayerKV(kind.kv_heads, kind.k_dim, kind.v_dim, kind.window)])
        builder = ProgramBuilder(layout)
        q, k = kind.heads * kind.k_dim, kind.kv_heads * kind.k_dim
        self.columns = q + k + kind.kv_heads * kind.v_dim
        self.width = kind.heads * kind.v_dim
        self.src, self.dst = builder.buffer(self.columns), builder.buffer(self.width)
        sizes = (kind.kv_heads, kind.k_dim, kind.v_dim)
        builder.append(Columns(self.src, q), Columns(self.src, q + k), *sizes, 0)
        window = kind.window or 0
        builder.attention(
            self.src, self.dst, kind.heads, *sizes, 0, kind.k_dim**-0.5, kind.softcap, window, kind.sinks
        )
        self.workspace = Workspace(builder.build(), max_threads=3)
        self.pool = PagePool()
        self.layout = layout

    def session(self) -> PagedCache:
        return PagedCache(self.layout, self.pool)

    def step(self, works: Sequence[tuple[PagedCache, int, Array]], threads: int = 1) -> list[Array]:
        """Run rows of several sessions, each from a position on; return what each gets."""
        for session, position, rows in works:
            session.reserve(position, len(rows))
        records = [StepWork(position, len(rows), session.tables_address) for session, position, rows in works]
        inputs = np.concatenate([rows for _, _, rows in works])
        run(self.workspace, records, {self.src: inputs}, threads=threads)
        for session, position, rows in works:
            session.advance(position + len(rows))
        out = self.workspace.buffer(self.dst)[: len(inputs), : self.width].copy()
        return np.split(out, np.cumsum([len(rows) for _, _, rows in works])[:-1])

    def whole(self, rows: Array) -> Array:
        """Run a new session's rows one by one, alone, with one thread: what every other way must equal."""
        session = self.session()
        outputs = [self.step([(session, at, rows[at : at + 1])])[0] for at in range(len(rows))]
        session.close()
        return np.concatenate(outputs)


def exact(kind: Kind, rows: Array) -> Array:
    """Return the attention of a session's rows [positions, q | k | v] in float64."""
    q, k = kind.heads * kind.k_dim, kind.kv_heads * kind.k_dim
    count, group = len(rows), kind.heads // kind.kv_heads
    wide = rows.astype(np.float64)
    queries = wide[:, :q].reshape(count, kind.heads, kind.k_dim)
    keys = wide[:, q : q + k].reshape(count, kind.kv_heads, kind.k_dim).repeat(group, 1)
    values = wide[:, q + k :].reshape(count, kind.kv_heads, kind.v_dim).repeat(group, 1)
    scores = np.einsum("ihd,jhd->hij", queries, keys) * kind.k_dim**-0.5
    if kind.softcap:
        scores = np.tanh(scores / kind.softcap) * kind.softcap
    apart = np.arange(count)[:, None] - np.arange(count)
    scores = np.where((apart >= 0) & (apart < (kind.window or count + 1)), scores, -np.inf)
    sinks = kind.sinks if kind.sinks is not None else np.full(kind.heads, -np.inf)
    largest = np.maximum(scores.max(-1), sinks[:, None])[..., None]
    powers = np.exp(scores - largest)
    shares = powers / (powers.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - largest))
    return np.einsum("hij,jhd->ihd", shares, values).reshape(count, -1)


KINDS = {
    "multi-head": Kind(heads=3, kv_heads=3),
    "grouped": Kind(heads=9, kv_heads=3, k_dim=64, v_dim=64),
    "one kv head": Kind(heads=5, kv_heads=1, k_dim=32, v_dim=32),
    "many heads to one": Kind(heads=40, kv_heads=1),
    "odd dims": Kind(heads=4, kv_heads=2, k_dim=24, v_dim=20),
    "wide keys": Kind(heads=2, kv_heads=2, k_dim=48, v_dim=32),
    "window": Kind(window=20),
    "window of 1": Kind(window=1),
    "window of pages": Kind(window=2 * PAGE),
    "softcap": Kind(softcap=2.0),
    "sinks": Kind(has_sinks=True),
    "all of it": Kind(heads=8, kv_heads=2, k_dim=20, v_dim=12, window=33, softcap=3.0, has_sinks=True),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_attention_is_that_of_float64(kind: Kind, rows: int) -> None:
    layer = Layer(kind)
    values = normal(rows, layer.columns, seed=rows)
    mine = layer.step([(layer.session(), 0, values)])[0]
    assert np.allclose(mine, exact(kind, values), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_prompt_at_once_has_the_bits_of_its_rows_one_by_one(kind: Kind) -> None:
    layer = Layer(kind)
    values = normal(150, layer.columns, scale=2)
    assert bits(layer.step([(layer.session(), 0, values)])[0]) == bits(layer.whole(values))


LAYERS = [Layer(KINDS[name]) for name in ("grouped", "window", "all of it", "many heads to one")]
LENGTH = 200
TEXTS = range(3)


@cache
def one_by_one(layer: Layer, seed: int) -> tuple[Array, Array]:
    """Return a text's rows, and what they give one by one."""
    text = normal(LENGTH, layer.columns, seed=seed)
    return text, layer.whole(text)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bits_depend_neither_on_cuts_nor_on_neighbours_nor_on_threads_nor_on_sharing(
    data: st.DataObject,
) -> None:
    layer = data.draw(st.sampled_from(LAYERS))
    texts = [one_by_one(layer, seed)[0] for seed in TEXTS]
    layer.pool = PagePool()
    caches = [layer.session() for _ in texts]
    got = [np.full((LENGTH, layer.width), np.nan, np.float32) for _ in texts]
    for _ in range(data.draw(st.integers(2, 6))):
        works = []
        for index, (session, text) in enumerate(zip(caches, texts, strict=True)):
            back = data.draw(st.integers(0, min(session.length, 3)))
            rows = data.draw(st.integers(0, min(70, LENGTH - session.length + back)))
            if rows:
                position = session.length - back
                works.append((index, position, text[position : position + rows]))
            elif data.draw(st.booleans()):
                caches[index] = session.fork(session.length)
                session.close()
        if works:
            outputs = layer.step(
                [(caches[i], at, rows) for i, at, rows in works], data.draw(st.integers(1, 2))
            )
            for (index, position, rows), output in zip(works, outputs, strict=True):
                got[index][position : position + len(rows)] = output
    for session, seed, output in zip(caches, TEXTS, got, strict=True):
        length = session.length
        assert bits(output[:length]) == bits(one_by_one(layer, seed)[1][:length])
        session.close()
    assert layer.pool.used_bytes == 0


def test_what_lies_in_later_positions_does_not_count_even_if_it_is_no_number() -> None:
    layer = Layer(Kind(has_sinks=True))
    values = normal(100, layer.columns)
    spoiled = values.copy()
    spoiled[41:] = np.nan
    session = layer.session()
    outputs = layer.step([(session, 0, spoiled)])[0]
    assert bits(outputs[:41]) == bits(layer.whole(values[:41]))
    assert np.isnan(outputs[41:]).all()
    assert bits(layer.step([(session, 41, values[41:])])[0]) == bits(layer.whole(values)[41:])


def test_pages_left_over_from_a_session_of_no_numbers_do_no_harm() -> None:
    layer = Layer(Kind(v_dim=20))
    values = normal(70, layer.columns)
    spoiled = layer.session()
    layer.step([(spoiled, 0, np.full((200, layer.columns), np.nan, np.float32))])
    spoiled.close()
    session = layer.session()
    assert bits(layer.step([(session, 0, values)])[0]) == bits(Layer(Kind(v_dim=20)).whole(values))


def test_a_long_window_goes_on_after_its_first_pages_are_freed() -> None:
    kind = Kind(heads=2, kv_heads=1, window=100)
    layer = Layer(kind)
    values = normal(1200, layer.columns)
    session = layer.session()
    outputs = [
        layer.step([(session, position, values[position : position + 150])])[0]
        for position in range(0, 1200, 150)
    ]
    assert np.allclose(np.concatenate(outputs), exact(kind, values), rtol=1e-5, atol=2e-6)
    assert session.size_bytes < 10 * layer.layout.page_floats[0] * 4


def test_scores_of_any_size_do_not_overflow() -> None:
    layer = Layer(Kind())
    values = normal(50, layer.columns, scale=1e3)
    mine = layer.step([(layer.session(), 0, values)])[0]
    assert np.isfinite(mine).all()
    assert np.allclose(mine, exact(layer.kind, values), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "expected"), [("grouped", "73c19ab2014caae1"), ("all of it", "f0f42236a6270aac")]
)
def test_the_bits_are_the_same_on_every_machine(name: str, expected: str) -> None:
    kind = KINDS[name]
    layer = Layer(replace(kind, has_sinks=False))
    assert digest(layer.step([(layer.session(), 0, patterned(130, layer.columns))])[0]) == expected
