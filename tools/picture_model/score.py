"""Judge a pipeline folder on scenes it was not trained on: `python -m tools.picture_model.score FOLDER`.

Prints the table of the model's card, and with `--sheet FILE.png` shows the pictures too: numbers do not
notice everything that an eye does.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from tools.picture_model.scenes import (
    COLOURS,
    OFFSET,
    PLACES,
    RADII,
    SHAPES,
    Scene,
    held_out_scenes,
    masks,
    plain_caption,
    shading,
)

BORDER = 3  # pixels of the frame that the background's colour is read from: no object covers half of it
LEAST_AREA = 12  # pixels; less is no object
SEED = 40
MARKS = ("<!-- scores: written by tools/picture_model/score.py -->", "<!-- end of scores -->")


@dataclass(frozen=True)
class Score:
    """What of one picture is as its caption says."""

    background: bool
    colour: bool
    shape: bool
    place: bool
    size: bool
    everything: bool
    overlap: float  # of the object with the caption's shape, put where it fits best: intersection over union


def score(picture: Tensor, scene: Scene) -> Score:
    """Judge one picture [3, side, side], 0 to 255."""
    ground = _border(picture / shading(picture.shape[1])).median(dim=1).values
    behind = ground[:, None, None] * shading(picture.shape[1])
    far = (picture - behind).norm(dim=0) > 60
    if far.sum() < LEAST_AREA:
        return Score(_nearest(ground) == scene.background, False, False, False, False, False, 0.0)
    ink = picture[:, far].median(dim=1).values
    step = ink[:, None, None] - behind
    covered = (((picture - behind) * step).sum(0) / step.square().sum(0).clamp_min(1.0)).clamp(0, 1)
    fits = {name: _fit(covered, name) for name in SHAPES}
    overlap, centre, radius = fits[scene.shape]
    places = {name: torch.tensor(at) * sum(OFFSET) / 2 for name, at in PLACES.items()}
    limit = (RADII["small"][1] + RADII["large"][0]) / 2
    right = {
        "background": _nearest(ground) == scene.background,
        "colour": _nearest(ink) == scene.colour,
        "shape": max(fits, key=lambda name: fits[name][0]) == scene.shape,
        "place": min(places, key=lambda name: float((places[name] - centre).norm())) == scene.place,
        "size": (radius < limit) == (scene.size == "small"),
    }
    return Score(**right, everything=all(right.values()), overlap=overlap)


def _border(picture: Tensor) -> Tensor:
    """Return the frame's pixels [3, N]."""
    inside = torch.zeros(picture.shape[1:], dtype=torch.bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    return picture[:, ~inside]


def _nearest(colour: Tensor) -> str:
    return min(COLOURS, key=lambda name: float((torch.tensor(COLOURS[name]) - colour).norm()))


def _fit(covered: Tensor, shape: str) -> tuple[float, Tensor, float]:
    """Put a shape where it has the area and the centre of gravity of `covered`: overlap, centre [2], radius."""
    side = len(covered)
    line = (torch.arange(side) + 0.5) / side * 2 - 1
    alone = masks([shape], torch.zeros(1, 2), torch.tensor([0.8]), side)[0]
    radius = 0.8 * float((covered.sum() / alone.sum()).sqrt())

    def gravity(mask: Tensor) -> Tensor:
        return torch.stack([(mask.sum(0) * line).sum(), (mask.sum(1) * line).sum()]) / mask.sum()

    centre = gravity(covered) - gravity(alone) * radius / 0.8
    put = masks([shape], centre[None], torch.tensor([radius]), side)[0]
    overlap = float(torch.minimum(put, covered).sum() / torch.maximum(put, covered).sum())
    return overlap, centre, radius


def paint(pipeline: DiffusionPipeline, captions: Sequence[str], steps: int, guidance: float) -> Tensor:
    """Return pictures [B, 3, side, side], 0 to 255, each of a seed of its own."""
    pictures: list[Tensor] = []
    for start in range(0, len(captions), 8):
        some = captions[start : start + 8]
        dice = [torch.Generator().manual_seed(SEED + start + index) for index in range(len(some))]
        made = pipeline(
            list(some),
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=dice,
            use_resolution_binning=False,
            clean_caption=False,
            output_type="np",
        )
        pictures.append(torch.from_numpy(made.images).permute(0, 3, 1, 2) * 255)
    return torch.cat(pictures)


def table(scores: Sequence[Score]) -> str:
    """Return the mean of every column, as Markdown."""
    names = [field.name for field in fields(Score)]
    means = [sum(getattr(score, name) for score in scores) / len(scores) for name in names]
    rows = [names, ["---"] * len(names), [f"{mean:.2f}" for mean in means]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def sheet(pictures: Tensor, file: Path, columns: int = 8, zoom: int = 2) -> None:
    """Write all pictures as one."""
    side = pictures.shape[-1] * zoom + 2
    page = Image.new("RGB", (side * columns, side * -(-len(pictures) // columns)))
    for index, picture in enumerate(pictures):
        pixels = Image.fromarray(picture.permute(1, 2, 0).round().numpy().astype(np.uint8))
        pixels = pixels.resize((side - 2, side - 2), Image.Resampling.NEAREST)
        page.paste(pixels, (index % columns * side, index // columns * side))
    page.save(file)


def write_into_card(card: Path, text: str) -> None:
    """Put the scores between the card's two marks."""
    before, _, rest = card.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    card.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--captions", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--sheet", type=Path, help="a PNG file to write all pictures to")
    parser.add_argument("--card", type=Path, help="the README.md to write the table into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = DiffusionPipeline.from_pretrained(arguments.folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    scenes = held_out_scenes(arguments.captions, SEED)
    captions = [plain_caption(scene) for scene in scenes]
    pictures = paint(pipeline, captions, arguments.steps, arguments.guidance)
    scores = [score(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    for caption, one in zip(captions, scores, strict=True):
        wrong = [field.name for field in fields(Score) if getattr(one, field.name) is False]
        print(f"{caption}: overlap {one.overlap:.2f}{', wrong: ' if wrong else ''}{', '.join(wrong[:-1])}")
    result = (
        f"{arguments.captions} held-out captions, {arguments.steps} steps, guidance {arguments.guidance:g}; "
        f"the share that is right, and the overlap (intersection over union) with the named shape:\n\n{table(scores)}"
    )
    print(result)
    if arguments.card:
        write_into_card(arguments.card, result)
    if arguments.sheet:
        sheet(pictures, arguments.sheet)


if __name__ == "__main__":
    main()
