"""Operations on rows by themselves: against torch, and their bits against their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as turn_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves

from slicing.fast.execute import StepWork, Workspace
from slicing.fast.program import Activation, Columns, ProgramBuilder
from tests.slicing.fast.steps import Array, bits, digest, normal, patterned, run, through

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
WIDTHS = [16, 20, 64, 100]  # whole vectors, and a part of one at the end


def close(mine: Array, theirs: torch.Tensor, relative: float = 1e-5) -> bool:
    return np.allclose(mine, theirs.float().numpy(), rtol=relative, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_within_a_few_units_in_the_last_place(activation: Activation) -> None:
    values = np.concatenate(
        [normal(1, 4000, seed=seed, scale=scale) for seed, scale in enumerate((0.1, 1, 5, 30))]
    )
    mine = through(lambda b, src, dst: b.activate(src, dst, 4000, activation), values, 4000)
    exact = ACTIVATIONS[activation](torch.from_numpy(values).double()).numpy()
    # GELU's 1 + erf cancels where x is far below 0, in torch as here: there, the error counts against x.
    scale = np.maximum(np.abs(exact), np.abs(values) * 0.25) if "gelu" in activation else np.abs(exact)
    normal_range = np.abs(exact) > 1e-35  # below it, e**-x is infinite, in torch as here
    assert np.max(np.abs(mine - exact)[normal_range] / scale[normal_range]) < 6e-7


def test_activations_of_what_is_not_a_number_or_infinite_are_as_in_torch() -> None:
    values = np.float32([[np.inf, -np.inf, np.nan, 0.0, -0.0, 89.0, -89.0, 1e-40]])
    for activation in ("tanh", "sigmoid", "relu"):
        mine = through(lambda b, src, dst, a=activation: b.activate(src, dst, 8, a), values, 8)
        theirs = ACTIVATIONS[activation](torch.from_numpy(values)).numpy()
        mine, theirs = np.nan_to_num(mine, nan=7), np.nan_to_num(theirs, nan=7 if activation != "relu" else 0)
        assert np.allclose(mine, theirs, rtol=1e-6, atol=1e-37), activation


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    values, weight = normal(5, 3 * width, scale=2), normal(width, seed=1)
    x = torch.from_numpy(values).view(5, 3, width)
    theirs = functional.rms_norm(x, (width,), torch.from_numpy(weight), 1e-5).reshape(5, -1)
    assert close(through(lambda b, s, d: b.rms_norm(s, d, weight, 1e-5, width, 3), values, 3 * width), theirs)
    plain = functional.rms_norm(x, (width,), None, 1e-5).reshape(5, -1)
    assert close(through(lambda b, s, d: b.rms_norm(s, s, None, 1e-5, width, 3), values), plain)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int) -> None:
    values, weight, bias = normal(5, 2 * width, scale=2) + 3, normal(width, seed=1), normal(width, seed=2)
    x = torch.from_numpy(values).view(5, 2, width)
    theirs = functional.layer_norm(x, (width,), torch.from_numpy(weight), torch.from_numpy(bias), 1e-5)
    mine = through(lambda b, s, d: b.layer_norm(s, d, weight, bias, 1e-5, width, 2), values, 2 * width)
    assert close(mine, theirs.reshape(5, -1), 3e-5)
    plain = functional.layer_norm(x, (width,), None, None, 1e-5).reshape(5, -1)
    assert close(
        through(lambda b, s, d: b.layer_norm(s, d, None, None, 1e-5, width, 2), values, 2 * width),
        plain,
        3e-5,
    )


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (24, 24), (40, 16)])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotary_is_torchs_to_the_bit(head_dim: int, rotary_dim: int, style: str) -> None:
    values = normal(7, 3 * head_dim)
    angles = torch.outer(torch.arange(50.0), 10.0 ** -torch.linspace(0, 3, rotary_dim // 2))
    angles = torch.cat([angles, angles], -1) if style == "half" else angles.repeat_interleave(2, -1)
    cos, sin = angles.cos(), angles.sin()
    x = torch.from_numpy(values).view(1, 7, 3, head_dim).transpose(1, 2)[..., :rotary_dim]
    turn = turn_halves if style == "half" else turn_pairs
    theirs = torch.from_numpy(values.copy()).view(7, 3, head_dim)
    theirs[..., :rotary_dim] = turn(x, x, cos[None, 30:37], sin[None, 30:37])[0][0].transpose(0, 1)

    def build(builder: ProgramBuilder, src: int, dst: int) -> None:
        builder.rotary(src, 3, head_dim, rotary_dim, cos.numpy(), sin.numpy(), style)

    assert np.array_equal(through(build, values, position=30), theirs.reshape(7, -1).numpy())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["halves", "alternating"])
@pytest.mark.parametrize("inter", [24, 48])
def test_a_gate_in_either_layout(activation: Activation, layout: str, inter: int) -> None:
    values = normal(3, 2 * inter, scale=2)
    x = torch.from_numpy(values)
    gate, up = x.chunk(2, -1) if layout == "halves" else (x[:, ::2], x[:, 1::2])
    mine = through(lambda b, s, d: b.gate(s, d, inter, activation, layout), values, inter)
    exact = (ACTIVATIONS[activation](gate.double()) * up).numpy()
    # GELU's 1 + erf cancels where the gate is far below 0, in torch as here: there, the error counts against the gate.
    scale = np.abs(exact) + 0.1 * np.abs((gate * up).numpy())
    assert np.all(np.abs(mine - exact) <= 1e-5 * scale + 1e-6)


def test_the_gate_of_gpt_oss() -> None:
    values = normal(3, 2 * 40, scale=6)
    x = torch.from_numpy(values)
    gate, up = x[:, ::2].clamp(max=7.0), x[:, 1::2].clamp(-7.0, 7.0)
    theirs = (up + 1) * gate * torch.sigmoid(gate * 1.702)
    assert close(
        through(lambda b, s, d: b.gate(s, d, 40, "oss_swiglu", "alternating", 1.702, 7.0), values, 40), theirs
    )


def test_sums_factors_caps_and_copies() -> None:
    values = normal(4, 2 * 20, scale=3)
    x = torch.from_numpy(values)
    left, right = x[:, :20], x[:, 20:]
    scaled = through(lambda b, s, d: b.scale(Columns(s, 20), 20, 0.3), values)
    assert np.array_equal(scaled, torch.cat([left, right * 0.3], -1).numpy())
    added = through(lambda b, s, d: b.add(Columns(s, 20), s, 20, 0.7), values)
    assert np.array_equal(added, torch.cat([left + right * 0.7, right], -1).numpy())
    capped = through(lambda b, s, d: b.softcap(Columns(s, 20), 20, 2.5), values)
    assert close(capped, torch.cat([left, torch.tanh(right / 2.5) * 2.5], -1))
    copied = through(lambda b, s, d: b.copy(Columns(s, 20), d, 20), values, 20)
    assert np.array_equal(copied, right.numpy())


def test_kept_rows_are_gathered_and_what_follows_runs_on_them_alone() -> None:
    builder = ProgramBuilder()
    src, dst = builder.buffer(20), builder.buffer(20)
    builder.gather(src, dst, 20)
    builder.scale(dst, 20, 2.0)
    workspace = Workspace(builder.build())
    values = normal(6, 20)
    run(workspace, [StepWork(0, 6)], {src: values, dst: np.zeros((6, 20), np.float32)}, kept=[4, 1, 5])
    assert np.array_equal(workspace.buffer(dst)[:3, :20], values[[4, 1, 5]] * 2)
    assert not workspace.buffer(dst)[3:6, :20].any()


def everything(builder: ProgramBuilder, src: int, dst: int) -> None:
    """One operation of each kind, on 72 columns."""
    weight = normal(24, seed=9)
    angles = np.outer(np.arange(64, dtype=np.float32), np.arange(24, dtype=np.float32))
    builder.rms_norm(src, src, weight, 1e-6, 24, 3)
    builder.rotary(src, 3, 24, 24, np.cos(angles), np.sin(angles))
    builder.layer_norm(src, src, weight, weight, 1e-6, 24, 3)
    builder.gate(src, dst, 36, "silu")
    builder.gate(src, Columns(dst, 36), 36, "gelu", "alternating")
    builder.softcap(dst, 72, 3.0)
    builder.activate(dst, dst, 72, "gelu_tanh")
    builder.add(src, dst, 72, 0.1)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), threads=st.integers(1, 3), seed=st.integers(0, 5))
def test_a_rows_bits_depend_neither_on_the_others_nor_on_the_threads(
    rows: int, threads: int, seed: int
) -> None:
    values = normal(rows, 72, seed=seed)
    together = through(everything, values, 72, threads=threads)
    for row in range(rows):
        assert bits(through(everything, values[row : row + 1], 72, position=row)) == bits(together[row])


def test_the_bits_are_the_same_on_every_machine() -> None:
    def build(builder: ProgramBuilder, src: int, dst: int) -> None:
        weight = patterned(24)
        builder.rms_norm(src, src, weight, 1e-6, 24, 3)
        builder.rotary(src, 3, 24, 16, patterned(9, 16), patterned(9, 16) + 1)
        builder.layer_norm(src, src, weight, weight, 1e-6, 24, 3)
        for column, activation in enumerate(ACTIVATIONS):
            builder.gate(src, Columns(dst, 36 * column), 36, activation)
        builder.softcap(dst, 36 * len(ACTIVATIONS), 3.0)

    assert digest(through(build, patterned(9, 72), 36 * len(ACTIVATIONS))) == "a745ebef21ef1e20"
