from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.engine.stop_scanner import StopScanner
from tests.app.conftest import patient

LETTERS = "abc"
texts = st.text(LETTERS, max_size=40)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def scan(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    seen = "".join(scanner.push(piece) for piece in pieces)
    return seen + scanner.finish(), scanner.is_stopped


def first_stop(text: str, stops: list[str]) -> str | None:
    """What a look at the whole text says: cut at the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@patient
@given(texts, stop_lists, st.data())
def test_however_the_text_is_cut_the_same_part_of_it_comes_through(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = first_stop(text, stops)
    assert scan(pieces, stops) == (text if expected is None else expected, expected is not None)


def test_a_stop_string_over_three_pieces_gives_none_of_its_characters() -> None:
    scanner = StopScanner(["STOP"])
    assert [scanner.push(piece) for piece in ("go S", "TO", "P on")] == ["go ", "", ""]
    assert scanner.is_stopped
    assert scanner.finish() == ""


def test_a_false_start_is_given_out_as_soon_as_it_is_certain() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert scanner.push("one\n") == "one"
    assert scanner.push("two") == "\ntwo"


def test_what_was_held_back_comes_at_the_end() -> None:
    scanner = StopScanner(["STOP"])
    assert scanner.push("ST") == ""
    assert scanner.finish() == "ST"
    assert not scanner.is_stopped


def test_of_two_stop_strings_that_end_together_the_longer_wins() -> None:
    assert scan(["xabc"], ["bc", "abc"]) == ("x", True)


def test_an_empty_stop_string_stops_nothing() -> None:
    assert scan(["abc"], [""]) == ("abc", False)
