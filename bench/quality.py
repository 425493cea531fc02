"""What smaller weights cost: perplexity and divergence from float32 on real text, for every form.

The text is Python's own reference manual, which every interpreter carries (`pydoc_data.topics`).
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import Any

import torch

from bench.report import Report
from slicing.ends import Parts
from slicing.load_runner import load_runner
from slicing.model_kind import shape_of
from slicing.model_source import open_checkpoint

MODEL = "smollm2"
WINDOW, NUM_WINDOWS = 512, 12  # 6,144 tokens
FORMS = ("fp32", "bf16", "int8")
SECTION = "quality"
BARS = {"bf16": ("<= 1.0005", ""), "int8": ("<= 1.003", "<= 0.005")}


def measure_quality(report: Report) -> None:
    """Perplexity over stock float32's, and KL(float32 || form) per token in nats."""
    report.section(SECTION)
    checkpoint = open_checkpoint(MODEL)
    windows = _windows(checkpoint.folder)
    report.add(SECTION, "tokens of text", NUM_WINDOWS * WINDOW, "", ">= 5000")
    stock = _stock_log_probs(checkpoint.folder, windows)
    base = _perplexity(stock, windows)
    report.add(SECTION, "transformers fp32: perplexity", base)
    for form in FORMS:
        ours = _our_log_probs(checkpoint, form, windows)
        perplexity, kl = _perplexity(ours, windows), _divergence(stock, ours)
        ratio_bar, kl_bar = BARS.get(form, ("", ""))
        report.add(SECTION, f"{form}: perplexity", perplexity)
        report.add(SECTION, f"{form}: perplexity over float32's", perplexity / base, "x", ratio_bar)
        report.add(SECTION, f"{form}: KL from float32", kl, "nats a token", kl_bar)
        same = sum(
            int((one.argmax(-1) == other.argmax(-1)).sum()) for one, other in zip(stock, ours, strict=True)
        )
        report.add(SECTION, f"{form}: same best token", same / (NUM_WINDOWS * WINDOW))


def _windows(folder: Any) -> list[torch.Tensor]:
    from transformers import AutoTokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert len(ids) >= WINDOW * NUM_WINDOWS
    stride = len(ids) // NUM_WINDOWS  # from all over the manual
    return [torch.tensor(ids[n * stride : n * stride + WINDOW]) for n in range(NUM_WINDOWS)]


def _stock_log_probs(folder: Any, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [_log_probs(model(ids[None]).logits[0]) for ids in windows]


def _our_log_probs(checkpoint: Any, form: str, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = Parts.whole(shape_of(checkpoint.config).num_layers)
    runner: Any = load_runner(checkpoint, parts, weights=form)  # type: ignore[arg-type]
    return [_log_probs(_logits(runner, ids)) for ids in windows]


def _logits(runner: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = runner.new_cache()
    with torch.inference_mode():
        states = runner.run_opening(cache, ids, 0, end=runner.num_layers)
        rows = list(range(len(ids)))
        logits: torch.Tensor = runner.run_closing(cache, states, len(ids), start=runner.num_layers, keep=rows)
    cache.close()
    return logits


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1)


def _perplexity(log_probs: list[torch.Tensor], windows: list[torch.Tensor]) -> float:
    losses = [
        -of_window[:-1].gather(1, ids[1:, None]).double().mean().item()
        for of_window, ids in zip(log_probs, windows, strict=True)
    ]
    return math.exp(sum(losses) / len(losses))


def _divergence(stock: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    parts = [
        (one.exp() * (one - other)).sum(-1).double().mean().item()
        for one, other in zip(stock, ours, strict=True)
    ]
    return sum(parts) / len(parts)
