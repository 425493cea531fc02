"""Writes `docs/pictures.md`: pictures made whole, in patches, and with a planted fault, one beside the other.

`python -m bench.diffusion_pictures [--model FOLDER]`, the model found as `bench.diffusion_quality` finds it. Look at
the sheet before you commit it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from PIL import Image, ImageDraw, ImageFont

from bench.diffusion_quality import (
    OTHER_SEED,
    STAGES,
    STEPS,
    Fault,
    Pictures,
    Way,
    captions,
    compare,
    find_model,
)

DOCS = Path(__file__).parent.parent / "docs"
PAGE, SHEET = DOCS / "pictures.md", DOCS / "pictures" / "sheet.png"
GUIDANCE = 3.0
EVERY = 4  # of the captions, this one goes onto the sheet
TILE, GAP, HEAD = 96, 6, 22  # pixels; a tile is about so large: the picture's own ones, whole times enlarged
GAIN = 16  # of differences, so that an eye sees them
WHOLE = Way("whole")
TWO, FOUR = Way("2 patches", 2), Way("4 patches", 4)
FAULT = Way("planted fault", 4, warmup=1, fault=Fault.EACH_OTHERS)

PAGE_TEXT = """\
# Pictures: whole, in patches, and with a fault

Written by `python -m bench.diffusion_pictures`, with the model `{model}` at {size} pixels: {steps} steps, guidance
{guidance:g}, {stages} stages, the same seed along each row.

![a sheet of pictures](pictures/sheet.png)

Columns: the whole picture; 2 patches and 4 patches after 4 whole steps, each with its difference to the whole one,
{gain} times as strong; and what a mix-up would do, planted for this page: 4 patches after one whole step, each guidance
branch finding the other's keys and values. With `patches` 1, the default, a picture is the whole one in every bit.

| {count} captions, levels of 255 | mean | median | worst | tone |
|---|---|---|---|---|
{rows}

Each picture counts by its mean difference to the whole one; tone is how far the mean of a colour moves. Rows:

{captions}
"""


def write_page(model: str) -> None:
    """Make the pictures, the sheet and the page."""
    pictures = Pictures(model)
    whole = pictures.make(WHOLE, GUIDANCE)
    two, four, fault = (pictures.make(way, GUIDANCE) for way in (TWO, FOUR, FAULT))
    columns = [
        ("whole", whole),
        ("2 patches", two),
        (f"x{GAIN}", (two - whole).abs() * GAIN),
        ("4 patches", four),
        (f"x{GAIN}", (four - whole).abs() * GAIN),
        ("planted fault", fault),
    ]
    SHEET.parent.mkdir(exist_ok=True)
    _sheet([(name, tensors[::EVERY]) for name, tensors in columns]).save(SHEET, optimize=True)
    shown = captions()[::EVERY]
    found = [
        ("another seed", compare(pictures.make(WHOLE, GUIDANCE, seed=OTHER_SEED), whole)),
        *((way.name, compare(pixels, whole)) for way, pixels in ((TWO, two), (FOUR, four), (FAULT, fault))),
    ]
    PAGE.write_text(
        PAGE_TEXT.format(
            model=pictures.name,
            size="x".join(map(str, whole.shape[2:])),
            steps=STEPS,
            guidance=GUIDANCE,
            stages=STAGES,
            gain=GAIN,
            count=len(captions()),
            rows="\n".join(_row(name, figures) for name, figures in found),
            captions="\n".join(f"{number}. {caption}" for number, caption in enumerate(shown, 1)),
        )
    )
    print(f"written: {PAGE} and {SHEET} ({SHEET.stat().st_size >> 10} KB)")


def _row(name: str, figures: dict[str, float]) -> str:
    return f"| {name} | {' | '.join(f'{figures[key]:.2f}' for key in ('mean', 'median', 'worst', 'tone'))} |"


def _sheet(columns: list[tuple[str, torch.Tensor]]) -> Image.Image:
    """A column for each name, a row for each picture, numbered."""
    font = ImageFont.load_default(12)
    num_rows, _, *sides = columns[0][1].shape
    times = max(1, round(TILE / max(sides)))
    height, width = (side * times for side in sides)
    full = (HEAD + len(columns) * (width + GAP), HEAD + num_rows * (height + GAP))
    sheet = Image.new("RGB", full, "white")
    draw = ImageDraw.Draw(sheet)
    for row in range(num_rows):
        draw.text((6, HEAD + row * (height + GAP) + height // 2 - 6), str(row + 1), "black", font)
    for column, (name, pictures) in enumerate(columns):
        left = HEAD + column * (width + GAP)
        draw.text((left, 4), name, "black", font)
        for row, picture in enumerate(pictures):
            sheet.paste(_tile(picture, (width, height)), (left, HEAD + row * (height + GAP)))
    return sheet


def _tile(picture: torch.Tensor, size: tuple[int, int]) -> Image.Image:
    """A picture [3, height, width] in levels, enlarged to (width, height)."""
    pixels = picture.clamp(0, 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def main() -> None:
    """Parse the flags and write the page."""
    parser = argparse.ArgumentParser(prog="bench.diffusion_pictures", description=__doc__)
    parser.add_argument("--model", help="a pipeline folder of text to pictures")
    write_page(find_model(parser.parse_args().model))


if __name__ == "__main__":
    main()
