"""Patches of a picture: some rows of its tokens, cut by height over all frames; and which of them are refused.

Patches are cut by height and never by time: on the trained small models a cut by time flipped whole pictures where a
cut by height did not (worst 48.6 against 5.2 of 255). Knows nothing of attention, kept keys or nodes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slicing.errors import ModelError

MIN_STEPS = (
    8  # with 6 steps of warm-up 1 the measured mean difference was 10 to 15 of 255: not a picture any more
)
MAX_PATCHES_PER_STAGE = 4  # beyond it a patch is too thin to fill a stage, and only the difference grows
MAX_TOKENS = 1 << 24  # a grid from the wire is believed up to here; the largest known models make 2^17


class Mode(enum.IntEnum):
    """How one pass is run."""

    WHOLE = 0  # all tokens; nothing is kept
    WHOLE_KEEP = (
        1  # all tokens; keys and values are kept, and patches are checked against the first such pass
    )
    PATCH = 2  # one patch's tokens, over kept keys and values


class PatchesRefused(ModelError):
    """Patches cannot be made of this request, model or grid; the text says which number is wrong, `param` whose."""

    def __init__(self, text: str, param: str = "patches") -> None:
        super().__init__(text)
        self.param = param


@dataclass(frozen=True)
class Cut:
    """Patch `index` of `of` patches of a grid of tokens.

    `grid` is (frames, height, width) in tokens, row-major as every diffusers model flattens it.
    Raises `PatchesRefused` for numbers that make no patch.
    """

    grid: tuple[int, int, int]
    index: int
    of: int

    def __post_init__(self) -> None:
        numbers = [*self.grid, self.index, self.of]
        if len(self.grid) != 3 or any(type(number) is not int for number in numbers):
            raise PatchesRefused("a cut has a grid of three whole numbers, an index and a number of patches")
        if min(self.grid) < 1 or math.prod(self.grid) > MAX_TOKENS:
            raise PatchesRefused(
                f"a grid of {'x'.join(map(str, self.grid))} tokens is not between 1 and {MAX_TOKENS}"
            )
        if not 1 <= self.of <= self.grid[1]:
            raise PatchesRefused(
                f"{self.of} patches cannot be cut from a picture of {self.grid[1]} rows of tokens: at most one a row"
            )
        if not 0 <= self.index < self.of:
            raise PatchesRefused(f"patch {self.index} of {self.of} does not exist")

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole picture or clip."""
        return math.prod(self.grid)

    def rows(self) -> torch.Tensor:
        """Numbers of this patch's tokens among all, ascending: int64 [n]."""
        frames, height, width = self.grid
        tokens = torch.arange(self.num_tokens).view(frames, height, width)
        first, last = self.index * height // self.of, (self.index + 1) * height // self.of
        return tokens[:, first:last].reshape(-1)

    def at(self, index: int) -> Cut:
        """Another patch of the same picture."""
        return Cut(self.grid, index, self.of)

    def all(self) -> Iterator[Cut]:
        """Every patch, in the order in which they must be run."""
        return map(self.at, range(self.of))

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """This patch's rows of `tokens` [B, S, ...]."""
        return tokens.index_select(1, self.rows().to(tokens.device))

    def to_json(self) -> dict[str, Any]:
        """As it stands in a call's header."""
        return {"grid": list(self.grid), "index": self.index, "of": self.of}

    @classmethod
    def from_json(cls, value: Any) -> Cut:
        """The inverse; raises `PatchesRefused` for anything else."""
        match value:
            case {"grid": [frames, height, width], "index": index, "of": of} if len(value) == 3:
                return cls((frames, height, width), index, of)
        raise PatchesRefused("a cut is an object of grid, index and of")


def join_patches(patches: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """All tokens [B, S, ...] from every patch's rows, in order of their index."""
    if len(patches) != cut.of:
        raise PatchesRefused(f"{len(patches)} patches came of {cut.of}")
    order = torch.cat([one.rows() for one in cut.all()])
    whole = torch.cat(list(patches), dim=1)
    return torch.empty_like(whole).index_copy_(1, order.to(whole.device), whole)


def check_patches(
    patches: int, *, warmup: int, steps: int, stages: int, grid: tuple[int, int, int] | None = None
) -> None:
    """Raise `PatchesRefused`, with the reason, unless so many patches make sense; one patch always does."""
    if patches < 1:
        raise PatchesRefused(f"patches is {patches}; it must be at least 1")
    if patches == 1:
        return
    if steps < MIN_STEPS:
        raise PatchesRefused(
            f"{steps} steps are too few for patches: below {MIN_STEPS} the picture drifts; use more steps or patches=1"
        )
    if warmup < 1:
        text = f"warmup is {warmup}; the first step is always whole, so it must be at least 1"
        raise PatchesRefused(text, "warmup")
    if patches > MAX_PATCHES_PER_STAGE * stages:
        raise PatchesRefused(
            f"{patches} patches are too many for {stages} stages: at most {MAX_PATCHES_PER_STAGE} for each stage"
        )
    if grid is not None:
        Cut(grid, 0, patches)


def find_grid(
    latents: Sequence[int], patch_size: int | Sequence[int], num_tokens: int
) -> tuple[int, int, int]:
    """(frames, height, width) in tokens of latents [B, C, H, W] or [B, C, F, H, W].

    Raises `PatchesRefused` where they do not multiply to `num_tokens`: nothing is known of where a token lies then.
    """
    sizes = [patch_size] if isinstance(patch_size, int) else list(patch_size)
    last = sizes[-1] if sizes else 1
    frame_size = sizes[0] if len(sizes) == 3 else 1
    if len(latents) not in (4, 5) or frame_size < 1 or last < 1:
        raise PatchesRefused(
            f"latents of {len(latents)} dimensions have no known grid of tokens: patches need one"
        )
    frames = latents[2] if len(latents) == 5 else 1
    row = sizes[-2] if len(sizes) > 1 else last
    grid = (-(-frames // frame_size), latents[-2] // max(row, 1), latents[-1] // last)
    if math.prod(grid) != num_tokens:
        raise PatchesRefused(
            f"a grid of {'x'.join(map(str, grid))} tokens does not multiply to the model's {num_tokens}: "
            "patches need to know where each token lies"
        )
    return grid
