"""Calls as data: anything that can be sent comes back the same, anything else is refused by name."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slicing.diffusion.calls import (
    DTYPES,
    BlockCall,
    Pass,
    Path,
    Plan,
    UnsupportedArgument,
    memory_order,
    pack_call,
    restore_order,
    snapshot,
    unpack_call,
)
from slicing.errors import ModelError

Pair = namedtuple("Pair", "left right")

tensors = st.builds(torch.zeros, st.integers(0, 3))
constants = st.none() | st.booleans() | st.integers(-(2**24), 2**24) | st.floats() | st.text(max_size=5)
leaves = constants | tensors | st.sampled_from(sorted(DTYPES.values(), key=str)) | st.just(torch.Size([2, 3]))
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(values, max_size=3), st.dictionaries(st.text(max_size=4), values, max_size=3))
def test_a_call_comes_back_as_it_was(args: list[Any], kwargs: dict[str, Any]) -> None:
    shape, slots = _packed(args, kwargs)
    plan = Plan("a.b", (BlockCall(0, tuple(range(len(slots)))),), (shape,), None, 1)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert _is_same(unpack_call(read.shapes[0], slots, []), (tuple(args), kwargs))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Pair(1, 2), "Pair"),
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (np.float32(1), "numpy.float32"),
        (np.zeros(2), "numpy.ndarray"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ({1: 2}, "builtins.dict"),
        (torch.device("cpu"), "torch.device"),
        (torch.float8_e5m2, "torch.dtype"),
        (lambda: 1, "builtins.function"),
        (1 << 40, "builtins.int"),
        (b"bytes", "builtins.bytes"),
    ],
)
def test_a_type_that_cannot_be_sent_is_refused_by_its_name_and_place(value: Any, name: str) -> None:
    with pytest.raises(UnsupportedArgument, match=rf"argument mask\[1\]\[key\] is a [\w.]*{name}"):
        _packed([], {"mask": [0, {"key": value}]})


def test_arguments_nested_too_deeply_are_refused() -> None:
    value: Any = 1
    for _ in range(12):
        value = [value]
    with pytest.raises(UnsupportedArgument, match=r"args\[0\]\[0\].* is a builtins.list"):
        _packed([value], {})


@given(jsons)
def test_any_json_is_refused_or_read(value: Any) -> None:
    with pytest.raises(ModelError):
        Plan.from_json(json.dumps(value).encode())


@given(st.data())
def test_a_spoiled_plan_is_refused_or_a_plan(data: st.DataObject) -> None:
    fields = json.loads(_plan().to_json())
    holder, key = data.draw(st.sampled_from(list(_places(fields))))
    holder[key] = data.draw(jsons)
    encoded = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    try:
        plan = Plan.from_json(encoded)
    except ModelError:
        return
    made = Pass(plan, [torch.zeros(1)] * plan.num_streams, [torch.zeros(1)] * plan.num_slots)
    for number in range(plan.first, plan.end):
        made.call(number, made.streams)
    assert plan.to_json() == encoded


@pytest.mark.parametrize(
    "encoded", [b"", b"\xff", b"[" * 100_000, b" " * (2 << 20), b'{"stack":"a"}', b"1e999"]
)
def test_bytes_that_are_no_plan_are_refused(encoded: bytes) -> None:
    with pytest.raises(ModelError):
        Plan.from_json(encoded)


def test_a_plan_written_in_another_way_is_refused() -> None:
    with pytest.raises(ModelError, match="another way"):
        Plan.from_json(_plan().to_json() + b" ")


def test_a_pass_that_lacks_a_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match="1 streams and 1 slots, but its plan names 1 and 2"):
        Pass(_plan(), [torch.zeros(1)], [torch.zeros(1)]).call(0, [torch.zeros(1)])


def test_a_pass_knows_which_slots_a_range_of_blocks_uses() -> None:
    made = Pass(_plan(), [torch.zeros(1)], [torch.zeros(1), torch.zeros(1)])
    assert [made.slots_between(*span) for span in [(0, 1), (1, 2), (0, 2), (1, 1)]] == [
        {0},
        {1},
        {0, 1},
        set(),
    ]


def test_the_digest_tells_plans_apart() -> None:
    one, other = _plan(), Plan("a.c", *list(vars(_plan()).values())[1:5])
    assert len(one.digest) == 16
    assert one.digest == _plan().digest != other.digest


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_a_tensor_keeps_its_order_in_memory(order: list[int], sizes: list[int]) -> None:
    tensor = torch.arange(int(np.prod(sizes)), dtype=torch.float32).reshape(sizes).permute(order)
    found = memory_order(tensor)
    sent = tensor.permute(found).contiguous()
    assert sent.data_ptr() == tensor.data_ptr()  # no copy
    received = restore_order(sent.clone(), found)
    assert torch.equal(received, tensor)
    assert memory_order(received) == found


def test_a_view_with_gaps_or_overlaps_is_sent_plain() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    assert memory_order(wide[:, :2]) == (0, 1)
    assert memory_order(torch.zeros(3, 1).expand(3, 5).transpose(0, 1)) == (0, 1)


@pytest.mark.parametrize("change", ["add", "item", "tensor"])
def test_a_change_to_arguments_is_seen(change: str) -> None:
    cache: dict[str, Any] = {"keys": [torch.zeros(2)], "length": 1}
    before = snapshot([cache], {})
    assert snapshot([cache], {}) == before
    if change == "add":
        cache["more"] = None
    elif change == "item":
        cache["length"] = 2
    else:
        cache["keys"][0] += 1
    assert snapshot([cache], {}) != before


def _packed(args: list[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    slots: list[torch.Tensor] = []

    def leaf_of(_path: Path, tensor: torch.Tensor) -> dict[str, int]:
        slots.append(tensor)
        return {"slot": len(slots) - 1}

    return pack_call(args, kwargs, leaf_of), slots


def _plan() -> Plan:
    shape = {
        "args": [{"stream": 0}, None, {"tuple": [{"slot": 0}, 1.5]}],
        "kwargs": {"kind": {"dtype": "float32"}, "limit": {"float": "-inf"}, "more": {"dict": {"a": [True]}}},
    }
    return Plan("a.b", (BlockCall(0, (0,)), BlockCall(0, (1,))), (shape,), (None, 0), 1)


def _places(value: Any) -> Any:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def _is_same(one: Any, other: Any) -> bool:
    """Compare values with tensors in them: those by identity, NaN equal to itself, types too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or one == other or (one != one and other != other)
