"""How loading is shown: lines into a file, bars on a terminal."""

from __future__ import annotations

import pytest

from cli.loading import LoadingView

PROGRESS = {"event": "progress", "stage": "load", "done_bytes": 500_000, "total_bytes": 1_000_000}


def test_a_file_gets_a_line_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingView() as view:
        listen = view.listener("node 1")
        listen(PROGRESS)
        view.done("node 1", "layers 0:10")
    assert capsys.readouterr().err == "node 1: starting\nnode 1: layers 0:10\n"


def test_a_terminal_gets_bars_with_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with LoadingView() as view:
        listen = view.listener("node 1")
        listen(PROGRESS)
        listen({"event": "measured"})
    said = capsys.readouterr().err
    assert "node 1" in said
    assert "500.0 kB of 1.0 MB" in said
