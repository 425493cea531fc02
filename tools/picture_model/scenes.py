"""The pictures that the small picture model learns: one plain object on a shaded background, and its caption.

Everything is drawn by formula, so there is no data set to fetch and no licence to mind. Pictures are
[-1, 1] tensors; a place is measured in half widths, -1 to 1, y downwards.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 220),
    "yellow": (240, 215, 50),
    "purple": (130, 50, 160),
    "orange": (245, 135, 30),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
    "pink": (250, 150, 190),
    "cyan": (60, 200, 215),
}
PLACES: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "middle": (0, 0),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
RADII: dict[str, tuple[float, float]] = {"small": (0.27, 0.30), "large": (0.43, 0.47)}
OFFSET = (0.43, 0.47)  # how far from the middle a named place is, in half widths: a large object stays inside
HELD_OUT = 20  # one scene in so many is kept from training, to judge by
SHADE = 0.3  # the background's lowest row is this much darker than its highest


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 0.95


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.85


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    return (x.abs() * 1.25 + y.abs() - 1.1) / 1.6


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(y - 0.8, x.abs() * 0.868 - (y + 1.05) * 0.496)


def _cross(x: Tensor, y: Tensor) -> Tensor:
    across, along = x.abs(), y.abs()
    bars = torch.maximum(across - 1.0, along - 0.34), torch.maximum(across - 0.34, along - 1.0)
    return torch.minimum(*bars)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.72).abs() - 0.25


def _star(x: Tensor, y: Tensor) -> Tensor:
    fifth = 2 * torch.pi / 5
    angle = torch.atan2(x, -y)  # 0 is upwards
    folded = (angle - torch.round(angle / fifth) * fifth).abs()
    radius = torch.hypot(x, y)
    along, across = radius * torch.cos(folded), radius * torch.sin(folded)
    # The edge runs from the tip (1.15, 0) to the inner corner, half a fifth on, at 0.5.
    inner_x, inner_y = 0.5 * 0.809, 0.5 * 0.588
    edge_x, edge_y = inner_x - 1.15, inner_y
    return ((along - 1.15) * -edge_y + across * edge_x) / -((edge_x**2 + edge_y**2) ** 0.5)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    lowered = y - 0.12
    tip = (x.abs() + lowered.abs() - 0.85) / 1.414
    lobes = torch.hypot(x.abs() - 0.425, lowered + 0.425) - 0.601
    return torch.minimum(tip, lobes)


# Signed distance to the edge, in radii: negative inside.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "star": _star,
    "ring": _ring,
    "diamond": _diamond,
    "heart": _heart,
}


@dataclass(frozen=True)
class Scene:
    """One picture in words. `None`: the caption does not say, so the picture may show anything."""

    shape: str
    colour: str | None
    background: str | None
    place: str | None
    size: str | None

    def completed(self, dice: random.Random) -> "Scene":
        """Choose what the caption leaves open."""
        colour = self.colour or dice.choice([name for name in COLOURS if name != self.background])
        return replace(
            self,
            colour=colour,
            background=self.background or dice.choice([name for name in COLOURS if name != colour]),
            place=self.place or dice.choice(list(PLACES)),
            size=self.size or dice.choice(list(RADII)),
        )


def random_scene(dice: random.Random, *, left_out: float = 0.0) -> Scene:
    """Return a scene; each of its optional parts is unsaid with probability `left_out`."""
    colour, background = dice.sample(list(COLOURS), 2)

    def said(value: str) -> str | None:
        return None if dice.random() < left_out else value

    return Scene(
        dice.choice(list(SHAPES)),
        said(colour),
        said(background),
        said(dice.choice(list(PLACES))),
        said(dice.choice(list(RADII))),
    )


def is_held_out(scene: Scene) -> bool:
    """Tell whether a complete scene is one of those never trained on."""
    return zlib.crc32(plain_caption(scene).encode()) % HELD_OUT == 0


def held_out_scenes(count: int, seed: int) -> list[Scene]:
    """Return `count` complete scenes that training never drew, the shapes in turn."""
    dice = random.Random(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = replace(random_scene(dice), shape=list(SHAPES)[len(scenes) % len(SHAPES)])
        if is_held_out(scene):
            scenes.append(scene)
    return scenes


def caption(scene: Scene, dice: random.Random) -> str:
    """Return one of several wordings of the scene."""
    subject = " ".join(word for word in ("a", scene.size, scene.colour, scene.shape) if word)
    place = dice.choice(_place_phrases(scene.place)) if scene.place else ""
    background = dice.choice(("on a {} background", "over a {} background", "against a {} backdrop", "on {}"))
    background = background.format(scene.background) if scene.background else ""
    match dice.randrange(5):
        case 0 | 1:
            parts = [subject, place, background]
        case 2:
            parts = [background + ("," if background else ""), subject, place]
        case 3:
            parts = [subject + (f", {place}" if place else "")]
            parts += [f", the background is {scene.background}"] if scene.background else []
        case _:
            parts = [f"{place}," if place else "", subject, background]
    return " ".join(part for part in parts if part)


def plain_caption(scene: Scene) -> str:
    """Return the scene in the one wording of the model's card."""
    parts = ["a", scene.size, scene.colour, scene.shape]
    parts += [_place_phrases(scene.place)[0]] if scene.place else []
    parts += [f"on a {scene.background} background"] if scene.background else []
    return " ".join(part for part in parts if part)


def _place_phrases(place: str) -> Sequence[str]:
    if " " in place:
        return f"in the {place} corner", f"at the {place}", place
    if place == "middle":
        return "in the middle", "at the center", "in the center"
    if place in ("top", "bottom"):
        return f"at the {place}", f"near the {place}", place
    return f"on the {place}", f"at the {place}", place


def draw(scenes: Sequence[Scene], dice: random.Random, side: int) -> Tensor:
    """Return pictures [B, 3, side, side] in [-1, 1] of complete scenes, each a little different from the last."""
    centres, radii, inks, grounds = [], [], [], []
    for scene in scenes:
        assert None not in astuple(scene), "a complete scene"
        across, down = PLACES[scene.place]
        offset = dice.uniform(*OFFSET)
        centres.append([across * offset + dice.gauss(0, 0.01), down * offset + dice.gauss(0, 0.01)])
        radii.append(dice.uniform(*RADII[scene.size]))
        inks.append([value + dice.gauss(0, 4) for value in COLOURS[scene.colour]])
        grounds.append([value + dice.gauss(0, 4) for value in COLOURS[scene.background]])
    mask = masks([scene.shape for scene in scenes], torch.tensor(centres), torch.tensor(radii), side)
    ink = torch.tensor(inks)[:, :, None, None]
    ground = torch.tensor(grounds)[:, :, None, None] * shading(side)
    pictures = ground + (ink - ground) * mask[:, None]
    return (pictures / 127.5 - 1).clamp(-1, 1)


def shading(side: int) -> Tensor:
    """Return the background's brightness by row [side, 1]: 1 at the top."""
    return 1 - SHADE * torch.linspace(0, 1, side)[:, None]


def masks(shapes: Sequence[str], centres: Tensor, radii: Tensor, side: int) -> Tensor:
    """Return the covered share of each pixel [B, side, side]; `centres` [B, 2] and `radii` [B] in half widths."""
    line = (torch.arange(side) + 0.5) / side * 2 - 1
    covered = torch.empty(len(shapes), side, side)
    for name, distance in SHAPES.items():
        rows = torch.tensor([index for index, shape in enumerate(shapes) if shape == name], dtype=torch.long)
        if not len(rows):
            continue
        radius = radii[rows, None, None]
        x = (line[None, None, :] - centres[rows, 0, None, None]) / radius
        y = (line[None, :, None] - centres[rows, 1, None, None]) / radius
        x, y = torch.broadcast_tensors(x, y)
        covered[rows] = (0.5 - distance(x, y) * radius * side / 2).clamp(0, 1)
    return covered
