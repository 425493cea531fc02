"""Train the small picture model: `python -m tools.picture_model.train --minutes 60 --state STATE.pt`.

One thread is enough. The state is saved every few minutes, and a run that finds one goes on from it.
`python -m tools.picture_model.export` makes a pipeline folder of a state, whenever.
"""

import argparse
import copy
import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from tools.picture_model.muon import Muon
from tools.picture_model.parts import FLOW_SHIFT, SIDE, build_text_encoder, build_tokenizer, build_transformer
from tools.picture_model.scenes import Scene, caption, draw, is_held_out, random_scene

BATCH = 32
NO_CAPTION = 0.1  # share of empty captions: guidance needs the model without one
LEFT_OUT = 0.12  # share of captions silent on one of colour, background, place, size
MUON_RATE = 0.006  # with steps of AdamW's size, 0.2 a weight times this
ADAM_RATE = 1.5e-3
WARMUP_STEPS = 100
COOLDOWN = 0.2  # the last share of the time: the rates fall to nothing
EMA_DECAY = 0.998
SAVE_S = 120.0
TEXT_SHIFT = (
    16.0  # half of the pictures are noisier than in sampling: there only the caption tells what to draw
)
LEAST_SIGMA = 0.5  # the loss counts errors of velocity, (x - answer) / sigma, and less of them below this

logger = logging.getLogger("picture_model")


class PictureModel(nn.Module):
    """Text encoder and transformer, trained as one."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder: T5EncoderModel = build_text_encoder()
        self.transformer: PixArtTransformer2DModel = build_transformer()

    def forward(self, noisy: Tensor, sigma: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the clean pictures [B, 3, H, W] that `noisy` at noise share `sigma` [B] may hide."""
        text = self.text_encoder(token_ids, attention_mask=mask)[0]
        answer = self.transformer(
            noisy,
            encoder_hidden_states=text,
            timestep=sigma * 1000,
            encoder_attention_mask=mask,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        )
        return answer.sample


@dataclass(frozen=True)
class Batch:
    pictures: Tensor  # [B, 3, H, W]
    token_ids: Tensor  # [B, T]
    mask: Tensor  # [B, T]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int = BATCH) -> Iterator[Batch]:
    """Yield captioned pictures without end, none of a held-out scene."""
    dice = random.Random(seed)
    while True:
        scenes: list[Scene] = []
        captions: list[str] = []
        while len(scenes) < size:
            said = random_scene(dice, left_out=LEFT_OUT)
            scene = said.completed(dice)
            if is_held_out(scene):
                continue
            scenes.append(scene)
            captions.append("" if dice.random() < NO_CAPTION else caption(said, dice))
        pictures = draw(scenes, dice, SIDE)
        tokens = tokenizer(captions, padding=True, return_tensors="pt")
        yield Batch(pictures, tokens.input_ids, tokens.attention_mask)


def loss_of(model: PictureModel, batch: Batch) -> Tensor:
    """Return the mean squared error of the velocity, at noise shares shifted towards pure noise."""
    pictures = batch.pictures
    share = (torch.arange(len(pictures)) + torch.rand(len(pictures))) / len(pictures)
    shift = torch.tensor([FLOW_SHIFT, TEXT_SHIFT]).repeat(len(pictures))[: len(pictures)]
    sigma = shift * share / (1 + (shift - 1) * share)
    wide = sigma[:, None, None, None]
    noisy = (1 - wide) * pictures + wide * torch.randn_like(pictures)
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(noisy, sigma, batch.token_ids, batch.mask)
    return ((answer.float() - pictures) / wide.clamp_min(LEAST_SIGMA)).square().mean()


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: object
) -> Tensor:
    """Attention in the open, in place of torch's: its fused one has a backward pass that is slow on CPUs."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1).to(value.dtype) @ value


def optimizers(model: PictureModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the blocks' matrices and AdamW for the rest."""
    matrices = [
        w
        for name, w in model.named_parameters()
        if w.ndim == 2 and "_blocks." in name and "table" not in name
    ]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        Muon(matrices, MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(rest, ADAM_RATE, betas=(0.9, 0.97), weight_decay=0.0),
    ]


def rate_share(step: int, elapsed: float) -> float:
    """Return the learning rate's share of its full size, by step at the start and by share of the time at the end."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1 - elapsed) / COOLDOWN)


def train(state_file: Path, minutes: float) -> None:
    """Train until `minutes` of this run and those before it are spent."""
    tokenizer, model = build_tokenizer(), PictureModel()
    averaged = copy.deepcopy(model).requires_grad_(False)
    tools = optimizers(model)
    base_rates = [tool.param_groups[0]["lr"] for tool in tools]
    step, spent, seed = 0, 0.0, 1
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        for tool, kept in zip(tools, state["optimizers"], strict=True):
            tool.load_state_dict(kept)
        step, spent, seed = state["step"], state["spent_s"], state["seed"] + 1
    torch.manual_seed(seed)
    started, saved_at, recent = time.monotonic() - spent, time.monotonic(), 0.0
    for batch in batches(tokenizer, seed):
        elapsed = (time.monotonic() - started) / (minutes * 60)
        for tool, rate in zip(tools, base_rates, strict=True):
            tool.param_groups[0]["lr"] = rate * rate_share(step, elapsed)
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad()
        step += 1
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"the loss is {loss.item()} at step {step}")
        recent += loss.item()
        if step % 50 == 0:
            logger.info("step %d, %.0f s, loss %.4f", step, time.monotonic() - started, recent / 50)
            recent = 0.0
        if elapsed >= 1 or time.monotonic() - saved_at > SAVE_S:
            save(state_file, model, averaged, tools, step, time.monotonic() - started, seed)
            saved_at = time.monotonic()
        if elapsed >= 1:
            return


def save(
    state_file: Path,
    model: PictureModel,
    averaged: PictureModel,
    tools: list[torch.optim.Optimizer],
    step: int,
    spent_s: float,
    seed: int,
) -> None:
    """Write the whole state of a run, in one move."""
    partial = state_file.with_suffix(".partial")
    kept = [tool.state_dict() for tool in tools]
    state = {"model": model.state_dict(), "averaged": averaged.state_dict(), "optimizers": kept}
    torch.save({**state, "step": step, "spent_s": spent_s, "seed": seed}, partial)
    partial.replace(state_file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="time to train, with the runs before")
    parser.add_argument("--state", type=Path, required=True, help="the file to go on from and to save to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    nn.functional.scaled_dot_product_attention = plain_attention  # a step takes half the time
    train(arguments.state, arguments.minutes)


if __name__ == "__main__":
    main()
