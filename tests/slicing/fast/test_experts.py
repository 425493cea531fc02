"""Layers of experts: against transformers' own, and their bits against neighbours and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from slicing.fast.execute import StepWork, Workspace
from slicing.fast.packing import pack
from slicing.fast.program import Expert, ProgramBuilder
from tests.slicing.fast.steps import Array, bits, digest, normal, patterned, run, through

HIDDEN, INTER, EXPERTS, TOP_K = 40, 24, 6, 3
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "hidden_act": "silu"}


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in [*module.parameters(), *module.buffers()]:
        nn.init.normal_(parameter, std=0.3)
    return module.float().eval()


def packed(experts: Any, *, transposed: bool = False, form: Any = "fp32") -> list[Expert]:
    """Pack transformers' stacked experts."""

    def turned(weight: torch.Tensor) -> torch.Tensor:
        return (weight.T if transposed else weight).contiguous().detach()

    biased = hasattr(experts, "gate_up_proj_bias")
    return [
        Expert(
            pack(turned(experts.gate_up_proj[index]), form),
            pack(turned(experts.down_proj[index]), form),
            experts.gate_up_proj_bias[index].detach().numpy() if biased else None,
            experts.down_proj_bias[index].detach().numpy() if biased else None,
        )
        for index in range(experts.gate_up_proj.shape[0])
    ]


class Layer:
    """A router and its experts as one program."""

    def __init__(
        self, experts: list[Expert], router: nn.Module, route: dict[str, Any], act: dict[str, Any]
    ) -> None:
        builder = ProgramBuilder()
        bias = router.bias.detach().numpy() if getattr(router, "bias", None) is not None else None
        self.src, logits = builder.buffer(HIDDEN), builder.buffer(len(experts))
        routes, self.dst = builder.buffer(2 * TOP_K), builder.buffer(HIDDEN)
        builder.linear(self.src, logits, pack(router.weight.detach(), "fp32"), bias)
        builder.route(logits, routes, len(experts), TOP_K, **route)
        builder.experts(self.src, self.dst, routes, experts, TOP_K, INTER, **act)
        self.workspace = Workspace(builder.build(), max_threads=3)

    def __call__(self, values: Array, threads: int = 1, start: float = 0.0) -> Array:
        starts = np.full((len(values), HIDDEN), start, np.float32)
        rows = run(
            self.workspace, [StepWork(0, len(values))], {self.src: values, self.dst: starts}, threads=threads
        )
        return self.workspace.buffer(self.dst)[:rows, :HIDDEN].copy()


def mixtral(add: bool = False, form: str = "fp32") -> tuple[nn.Module, Layer]:
    config = MixtralConfig(intermediate_size=INTER, num_local_experts=EXPERTS, **SIZES)
    block = filled(MixtralSparseMoeBlock(config))
    route = {"mode": "softmax_then_topk", "normalise": True}
    return block, Layer(
        packed(block.experts, form=form), block.gate, route, {"activation": "silu", "add": add}
    )


def qwen3(norm_topk_prob: bool) -> tuple[nn.Module, Layer]:
    config = Qwen3MoeConfig(
        moe_intermediate_size=INTER, num_experts=EXPERTS, norm_topk_prob=norm_topk_prob, **SIZES
    )
    block = filled(Qwen3MoeSparseMoeBlock(config))
    route = {"mode": "softmax_then_topk", "normalise": norm_topk_prob}
    return block, Layer(packed(block.experts), block.gate, route, {"activation": "silu"})


def gpt_oss() -> tuple[nn.Module, Layer]:
    config = GptOssConfig(intermediate_size=INTER, num_local_experts=EXPERTS, **SIZES)
    block = filled(GptOssMLP(config))
    act = {"activation": "oss_swiglu", "layout": "alternating", "alpha": 1.702, "limit": 7.0}
    layer = Layer(packed(block.experts, transposed=True), block.router, {"mode": "topk_then_softmax"}, act)
    return block, layer


def deepseek(groups: int, top_groups: int) -> tuple[nn.Module, Layer]:
    config = DeepseekV3Config(
        moe_intermediate_size=INTER,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=groups,
        topk_group=top_groups,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        **SIZES,
    )
    block = filled(DeepseekV3MoE(config))
    route = {
        "mode": "sigmoid_then_topk",
        "normalise": True,
        "factor": 2.5,
        "bias": block.gate.e_score_correction_bias.numpy(),
        "groups": groups,
        "top_groups": top_groups,
    }
    return block, Layer(packed(block.experts), block.gate, route, {"activation": "silu"})


def answer(block: nn.Module, values: Array) -> Array:
    with torch.no_grad():
        output = block(torch.from_numpy(values)[None])
    return (output[0] if isinstance(output, tuple) else output).reshape(len(values), -1).numpy()


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "make",
    [mixtral, lambda: qwen3(True), lambda: qwen3(False), gpt_oss],
    ids=["mixtral", "qwen3_moe normalised", "qwen3_moe", "gpt_oss"],
)
def test_experts_are_those_of_transformers(make: Any, rows: int) -> None:
    block, layer = make()
    values = normal(rows, HIDDEN, seed=rows)
    assert np.allclose(layer(values), answer(block, values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_experts_chosen_by_groups_are_those_of_deepseek(groups: int, top_groups: int) -> None:
    block, layer = deepseek(groups, top_groups)
    values = normal(9, HIDDEN)
    with torch.no_grad():
        shared = block.shared_experts(torch.from_numpy(values)).numpy()
    assert np.allclose(layer(values) + shared, answer(block, values), rtol=1e-5, atol=1e-5)


def test_what_was_there_is_added_to_once() -> None:
    _, layer = mixtral()
    _, adding = mixtral(add=True)
    values = normal(5, HIDDEN)
    assert np.array_equal(adding(values, start=2.0), layer(values) + np.float32(2.0))


def test_equal_scores_go_to_the_lower_expert() -> None:
    logits = np.float32([[1, 3, 3, 0, 3, 1], [0, 0, 0, 0, 0, 0]])
    mine = through(lambda b, s, d: b.route(s, d, 6, 2, "softmax_then_topk", normalise=True), logits, 4)
    assert mine.tolist() == [[1, 2, 0.5, 0.5], [0, 1, 0.5, 0.5]]


@pytest.mark.parametrize("mode", ["softmax_then_topk", "topk_then_softmax", "sigmoid_then_topk"])
def test_rows_that_are_not_numbers_still_name_experts_that_exist(mode: Any) -> None:
    logits = np.full((2, 6), np.nan, np.float32)
    logits[1] = [np.inf, -np.inf, np.nan, 0, 1, np.inf]
    chosen = through(lambda b, s, d: b.route(s, d, 6, 3, mode), logits, 6)[:, :3]
    assert ((chosen >= 0) & (chosen < 6) & (chosen == np.round(chosen))).all()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 20), threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_a_rows_bits_depend_neither_on_the_others_nor_on_the_threads(
    rows: int, threads: int, seed: int
) -> None:
    values = normal(rows, HIDDEN, seed=seed)
    together = INT8(values, threads)
    for row in range(rows):
        assert bits(INT8(values[row : row + 1])) == bits(together[row])


def test_the_bits_are_the_same_on_every_machine() -> None:
    experts = [
        Expert(
            pack(torch.from_numpy(patterned(EXPERTS, 2 * INTER, HIDDEN)[index]), "int8"),
            pack(torch.from_numpy(patterned(EXPERTS, HIDDEN, INTER)[index]), "bf16"),
        )
        for index in range(EXPERTS)
    ]
    router = nn.Linear(HIDDEN, EXPERTS, bias=False)
    router.weight.data = torch.from_numpy(patterned(EXPERTS, HIDDEN)) / 16
    layer = Layer(experts, router, {"mode": "topk_then_softmax"}, {"activation": "gelu_tanh"})
    assert digest(layer(patterned(20, HIDDEN))) == "272f5bf9cc5160bc"


INT8 = mixtral(form="int8")[1]
