"""Tiny pipelines opened once for all tests here: pictures never change what is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from app.engine.diffusion.model import OpenedPipeline
from tests.support.opened_pictures import open_tiny
from tests.support.tiny_pipelines import TinyPipelines, quiet

Open = Callable[[str], OpenedPipeline]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """In one thread; what diffusers warns about while it runs is not ours to mend."""
    torch.set_num_threads(1)
    with quiet():
        yield


@pytest.fixture(scope="session")
def opened(tiny_pipelines: TinyPipelines) -> Open:
    """The pipeline of a name without its remote blocks."""
    return cache(lambda name: open_tiny(tiny_pipelines, name))
