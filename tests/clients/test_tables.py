"""What `make clients` makes of results: nothing that fails is passed over, and no excuse outlives its reason."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.wires import SCENARIOS, Wire, reading
from tools import client_environments
from tools.client_suites import Listed, outcomes, problems, read_list
from tools.client_wires import EXCUSED, differences
from tools.clients import Told, table, verdict

REPORT = """<testsuites><testsuite>
<testcase classname="a.TestB" name="test_one[x]"/>
<testcase classname="a.TestB" name="test_two"><failure message="no"/></testcase>
<testcase classname="a.TestB" name="test_three"><skipped/></testcase>
<testcase classname="a.TestB" name="test_four"><error message="no"/></testcase>
</testsuite></testsuites>"""
NAME = "openai-python 3.57.0"


def frames(*lines: str) -> bytes:
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def test_a_report_is_read_test_by_test() -> None:
    assert outcomes(REPORT) == {
        "a.TestB::test_one[x]": "passed",
        "a.TestB::test_two": "failed",
        "a.TestB::test_three": "skipped",
        "a.TestB::test_four": "failed",
    }


def test_a_failure_counts_unless_it_is_listed() -> None:
    assert list(problems({"a::one": "failed"}, [])) == ["failed: a::one"]
    assert not list(problems({"a::one": "failed"}, [Listed(("a::*",), "it is so")]))
    assert list(problems({}, [])) == ["no test ran"]


def test_a_listed_test_that_passes_or_is_gone_counts() -> None:
    found = list(problems({"a::one[x]": "passed"}, [Listed(("a::one[*", "b::*"), "it was so")]))
    assert found == ["listed, but passes: a::one[x]", "listed, but there is no such test: b::*"]
    assert not list(problems({"a::one": "passed"}, [Listed(("a::one",), "wit", may_pass=True)]))


@pytest.mark.parametrize("name", ["openai-api", "langchain-fixture", "langchain-smollm2"])
def test_each_line_of_the_lists_has_a_reason(name: str) -> None:
    assert all(entry.reason and entry.patterns for entry in read_list(name))


def test_a_failure_fails_the_run_and_is_shown() -> None:
    passed, failed = Told(NAME, "chat", "pass"), Told(NAME, "tools", "fail", "no calls")
    assert verdict([passed]) == 0
    assert verdict([passed, failed]) == 1
    assert verdict([Told(NAME, "all", "skip", "npm is not installed")]) == 1  # nothing was shown to work
    assert "FAIL" in table([passed, failed])


def test_an_environment_that_cannot_be_made_says_why_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_environments, "HOME", tmp_path)
    wanted = tmp_path / "list.txt"
    wanted.write_text("openai==3.57.0")
    answers = [subprocess.CalledProcessError(1, "pip", stderr="WARNING: slow\nno registry"), None]

    def make(_: Path, folder: Path) -> None:
        if error := answers.pop(0):
            raise error
        folder.mkdir()

    assert client_environments._made("py", wanted, make).missing == "cannot be installed: no registry"
    assert not client_environments._made("py", wanted, make).missing
    assert not client_environments._made("py", wanted, make).missing  # is there: not made again


def test_a_parser_that_reads_otherwise_is_told_and_so_is_a_needless_excuse() -> None:
    right: dict[str, Any] = {"text": ["one"], "usage": None, "error": False, "finish": ["stop"]}
    assert not list(differences("any", {"text": right}, {"text": {**right, "usage": [1, 2]}}))
    assert list(differences("any", {"text": right}, {})) == ["text: not read"]
    assert len(list(differences("any", {"text": right}, {"text": {**right, "text": ["on"]}}))) == 1
    parser, name, field = next(iter(EXCUSED))
    assert "EXCUSED" in next(iter(differences(parser, {name: right}, {name: {field: right[field]}})))


def test_a_wire_is_read_by_the_standard() -> None:
    body = b": keep-alive\n\n" + frames(
        '{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
        '{"choices": [{"index": 0, "delta": {"content": "a\\u2028b"}, "finish_reason": null}]}',
        '{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
        "[DONE]",
    )
    found = reading(Wire(SCENARIOS["text"], "text/event-stream", body))
    assert (found["text"], found["finish"], found["usage"]) == (["a\u2028b"], ["stop"], [3, 2])
    with pytest.raises(AssertionError, match="clients break on: id"):
        reading(Wire(SCENARIOS["text"], "text/event-stream", b"id: 1\n\n"))
