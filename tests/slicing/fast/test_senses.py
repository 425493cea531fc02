"""Models that see or hear, where their text part is one that kernels know: what they see comes as embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slicing.batch import Work
from slicing.ends import Parts
from slicing.load_runner import CannotRun, load_runner
from slicing.model_source import open_checkpoint
from tests.support.tiny_multimodal import write_multimodal

NUM_LAYERS = 4
ROWS = 9


def logits_of(runner: object, work: Work) -> torch.Tensor:
    states = runner.run_opening_batch([work], end=2)[0]  # type: ignore[attr-defined]
    states = runner.run_layers_batch(  # type: ignore[attr-defined]
        [Work(work.cache, states, work.position)], start=2, end=3
    )[0]
    closing = Work(work.cache, states, work.position, range(len(states)))
    made: torch.Tensor = runner.run_closing_batch([closing], start=3)[0]  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("family", ["llava", "qwen2_audio"])
def test_embeddings_and_the_tokens_after_them_are_those_of_the_plain_runner(
    family: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(write_multimodal(tmp_path, family)))
    fast = load_runner(checkpoint, Parts.whole(NUM_LAYERS))
    assert fast.form.startswith("fast/")
    plain = load_runner(checkpoint, Parts.whole(NUM_LAYERS), runner="plain")
    embeds = torch.randn(ROWS, fast.hidden_size, generator=torch.Generator().manual_seed(1))
    caches = [fast.new_cache(), plain.new_cache()]
    for inputs, position in ((embeds, 0), (torch.tensor([7, 9]), ROWS), (embeds[:1], ROWS + 2)):
        mine, theirs = [
            logits_of(runner, Work(cache, inputs, position))
            for runner, cache in zip((fast, plain), caches, strict=True)
        ]
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_embeddings_beside_tokens_have_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_multimodal(tmp_path, "llava")))
    fast = load_runner(checkpoint, Parts.whole(NUM_LAYERS), runner="fast")
    inputs = [
        torch.randn(ROWS, fast.hidden_size, generator=torch.Generator().manual_seed(1)),
        torch.arange(ROWS) + 4,
    ]
    alone = [fast.run_opening_batch([Work(fast.new_cache(), rows, 0)], end=NUM_LAYERS)[0] for rows in inputs]
    together = fast.run_opening_batch([Work(fast.new_cache(), rows, 0) for rows in inputs], end=NUM_LAYERS)
    assert all(map(torch.equal, together, alone))


def test_positions_of_several_axes_are_left_to_the_invariant_runner(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_multimodal(tmp_path, "qwen2_vl")))
    with pytest.raises(CannotRun, match="several axes"):
        load_runner(checkpoint, Parts.whole(NUM_LAYERS), runner="fast")
    runner = load_runner(checkpoint, Parts.whole(NUM_LAYERS))
    assert runner.form.startswith("invariant/")
    assert runner.max_axes == 3


def test_rows_at_positions_of_their_own_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_multimodal(tmp_path, "llava")))
    fast = load_runner(checkpoint, Parts.whole(NUM_LAYERS), runner="fast")
    assert fast.max_axes == 0
    work = Work(fast.new_cache(), torch.tensor([5]), 0, places=torch.tensor([[3]]))
    with pytest.raises(ValueError, match="counted"):
        fast.run_opening_batch([work], end=NUM_LAYERS)
