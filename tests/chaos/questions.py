"""What the soak asks, and what an undisturbed swarm answers.

Greedy answers come from the whole model, drawn ones from the gateway before anything is hurt.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from tests.chaos.model import WholeAnswers

# Of 15 to 140 tokens: the model has 256 positions, and words are two to five tokens each.
_PROMPTS = (
    "hello",
    "quick the fox",
    "brown the end",
    "hello the world and the quick brown fox",
    " ".join(["jumps over the lazy dog"] * 3),
    " ".join(["the quick brown fox says hello to the end of the world"] * 3),
)
_NUM_TOKENS = (4, 12, 24, 40)
_SEEDS = (None, 7, 11)


@dataclass(frozen=True)
class Question:
    """One request; `seed` None is greedy. `expected` is what must come back."""

    prompt: str
    num_tokens: int
    seed: int | None
    expected: str = ""


@dataclass(frozen=True)
class Questions:
    """All that are asked, each with its answer."""

    known: tuple[Question, ...]

    @classmethod
    async def learn(cls, whole: WholeAnswers, ask: Callable[[Question], Awaitable[str]]) -> Questions:
        """Ask each drawn one once. Call it while nothing is hurt."""
        known = []
        for question in _all():
            is_greedy = question.seed is None
            text = whole.greedy(question.prompt, question.num_tokens) if is_greedy else await ask(question)
            known.append(replace(question, expected=text))
        return cls(tuple(known))

    def draw(self, rng: random.Random) -> Question:
        """Any of them."""
        return rng.choice(self.known)


def _all() -> Iterator[Question]:
    for prompt in _PROMPTS:
        for num_tokens in _NUM_TOKENS:
            for seed in _SEEDS:
                yield Question(prompt, num_tokens, seed)
