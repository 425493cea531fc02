"""Thoughts told apart from answers, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.reasoning import BLOCKS, HARMONY, Part, ReasoningStyle, Thoughts, reasoning_style_of
from tests.app.conftest import patient

THINK = BLOCKS[0]


def split(style: ReasoningStyle, pieces: list[str], *, is_open: bool = False) -> list[Part]:
    splitter = Thoughts(style, is_open=is_open).splitter()
    made = [part for piece in pieces for part in splitter.push(piece)]
    return made + splitter.finish()


def told(style: ReasoningStyle, text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Thought and answer, which must not hang on where the text is cut; nothing of it is lost."""
    whole = split(style, [text], is_open=is_open)
    by_letter = split(style, list(text), is_open=is_open)
    assert "".join(piece for _, piece in whole) == text
    thoughts = [
        tuple("".join(piece for kind, piece in parts if kind == wanted) for wanted in ("thought", "answer"))
        for parts in (whole, by_letter)
    ]
    assert thoughts[0] == thoughts[1]
    return thoughts[0][0], thoughts[0][1]


def test_a_mark_that_comes_a_thousand_times_is_passed_over_each_time() -> None:
    assert told(THINK, "<think>" * 3000 + "why</think>so", is_open=True) == ("why", "so")


@pytest.mark.parametrize("style", BLOCKS, ids=[style.opener for style in BLOCKS])
def test_a_block_is_a_thought_without_the_whitespace_around_it(style: ReasoningStyle) -> None:
    text = f"\n{style.opener}\nlet me see\n\nyes\n{style.closer}\n\nhello "
    assert told(style, text) == ("let me see\n\nyes", "hello ")


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("why\n</think>\n\nso", "why", "so"),
        ("<think>\nwhy</think>so", "why", "so"),  # the prompt opened it, and the model does again
        ("\n</think>\n\nso", "", "so"),
        ("why \n", "why", ""),
        ("why </thi", "why </thi", ""),
        ("a < b </ c</think>d", "a < b </ c", "d"),
    ],
)
def test_a_prompt_may_have_opened_the_block(text: str, thought: str, answer: str) -> None:
    assert told(THINK, text, is_open=True) == (thought, answer)


@pytest.mark.parametrize(
    "text", ["hello", "  hello", "<thin air", "the <think> mark", "", " ", "hello <think>no</think>"]
)
def test_an_answer_that_begins_otherwise_has_no_thought(text: str) -> None:
    assert told(THINK, text) == ("", text)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi",
            "hm",
            "hi",
        ),
        ("<|channel|>final<|message|>a < b<|return|>", "", "a < b"),
        ("<|channel|>analysis<|message|>hm", "hm", ""),
        ("<|channel|>analysis<|mess", "", ""),
        ("plain words", "", "plain words"),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.now <|constrain|>json<|message|>{}<|call|>",
            "",
            "I look.to=functions.now <|constrain|>json<|message|>{}",
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.now<|channel|>commentary "
            "json<|message|>{}",
            "hm",
            "to=functions.now<|channel|>commentary json<|message|>{}",
        ),
    ],
)
def test_what_is_on_the_analysis_channel_is_a_thought(text: str, thought: str, answer: str) -> None:
    assert told(HARMONY, text) == (thought, answer)


def test_marks_are_found_in_the_template_or_among_the_tokens() -> None:
    assert reasoning_style_of("{{ '<think>' }}..{{ '</think>' }}", ()) == THINK
    assert reasoning_style_of("", {"[THINK]", "[/THINK]"}) == BLOCKS[1]
    assert reasoning_style_of("{{ '<think>' }}", {"<think>"}) is None
    assert reasoning_style_of("<think></think>", {"<|channel|>", "<|message|>"}) == HARMONY
    assert reasoning_style_of("{{ message.content }}", {"<|im_end|>"}) is None


FRAGMENTS = [
    "<think>",
    "</think>",
    "<",
    "</",
    "think>",
    "\n",
    " ",
    "word",
    "<|channel|>",
    "analysis",
    "final",
]
FRAGMENTS += ["<|message|>", "<|end|>", "<|start|>", "assistant", "to=functions.", "{", "}"]


@patient
@given(st.sampled_from([THINK, HARMONY]), st.booleans(), st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_nothing_is_lost_and_cuts_do_not_matter(
    style: ReasoningStyle, is_open: bool, parts: list[str]
) -> None:
    told(style, "".join(parts), is_open=is_open)
