"""Headers of safetensors files: what is read, and every damage that is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slicing.errors import ModelError
from slicing.tensor_file import parse_header, read_tensor_ranges, write_tensors


def entry(begin: int, end: int, *, dtype: str = "F32", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def test_ranges_are_where_the_library_wrote_the_tensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.randn(2).bfloat16(),
        "d": torch.tensor(1.5),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    content = (tmp_path / "x.safetensors").read_bytes()
    ranges = read_tensor_ranges(tmp_path / "x.safetensors")
    assert ranges.keys() == tensors.keys()
    for name, place in ranges.items():
        held = torch.frombuffer(bytearray(content[place.begin : place.end]), dtype=place.dtype)
        assert torch.equal(held.reshape(place.shape), tensors[name])


def test_written_files_are_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).t(),
        "a": torch.randn(7),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.0),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sizes = list(write_tensors(tmp_path / "x.safetensors", shapes, reversed(tensors.items())))
    assert sizes == [4, 0, 28, 60]
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert read_tensor_ranges(tmp_path / "x.safetensors")["b"].begin % 64 == 0


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry(0, 9000)}, "ends at byte"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, "overlaps"),
        ({"a": entry(0, 8, shape=[3])}, "not what its shape needs"),
        ({"a": entry(0, 8, shape=[-2])}, "no valid shape"),
        ({"a": entry(0, 8, shape=[True, 2])}, "no valid shape"),
        ({"a": entry(0, 8, shape=2)}, "no valid shape"),
        ({"a": entry(8, 0, shape=[2])}, "not what its shape needs"),
        ({"a": entry(0, 8, shape=[2**62, 2**62])}, "not what its shape needs"),
        ({"a": entry(0, 8, dtype="F4")}, "cannot read"),
        ({"a": entry(0, 8) | {"data_offsets": [0, 8, 16]}}, "no valid shape"),
        ({"a": 5}, "not a table"),
        ([1], "not a table"),
    ],
)
def test_a_senseless_header_is_refused(header: object, reason: str) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ModelError, match=f"model.safetensors is damaged.*{reason}"):
        parse_header(text, 8 + len(text) + 64, Path("model.safetensors"))


def test_a_name_that_stands_twice_is_refused() -> None:
    twice = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(ModelError, match="not valid JSON"):
        parse_header(twice, 10_000, Path("x"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (b"\0" * 8, "too short"),
        ((2**63).to_bytes(8, "little") + b"{}", "its header claims"),
        ((5000).to_bytes(8, "little") + b"{}", "its header claims"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not valid JSON"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_one_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=f"bad.safetensors is damaged: .*{reason}"):
        read_tensor_ranges(tmp_path / "bad.safetensors")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*gone\.safetensors"):
        read_tensor_ranges(tmp_path / "gone.safetensors")


@given(st.binary(max_size=300), st.integers(0, 300))
def test_no_bytes_raise_anything_else(header: bytes, size: int) -> None:
    try:
        for place in parse_header(header, size, Path("x")).values():
            assert 0 <= place.begin <= place.end <= size
    except ModelError:
        pass
