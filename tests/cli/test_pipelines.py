"""Commands that look at models take a diffusion model's folder as they take a text model's."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from cli import options as opt
from cli.failures import CommandError
from cli.main import app
from cli.models import _print_swarm
from cli.ports import bind_loopback
from cli.up import SwarmPlan, _Swarm
from routing.network_status import ModelStatus
from tests.cli.swarm import DIGEST
from tests.support.tiny_pipelines import TinyPipelines


def swarm(ends: opt.Ends = opt.Ends.LOCAL) -> _Swarm:
    plan = SwarmPlan("wan", 3, ends, (1, 0), 1, opt.Weights.AUTO, opt.Runner.AUTO, None)
    with closing(bind_loopback(0)) as listener:
        return _Swarm(plan, listener, lambda command: {})


@pytest.mark.parametrize(
    ("name", "num_layers", "kind"),
    [("pixart", 4, "picture"), ("wan-two", 8, "video"), ("stable-audio", 4, "audio")],
)
def test_prepare_tells_blocks_and_kind(
    name: str, num_layers: int, kind: str, tiny_pipelines: TinyPipelines
) -> None:
    folder = str(tiny_pipelines.folder(name))
    done = CliRunner().invoke(app, ["prepare", "--model", folder, "--events", "json"])
    assert json.loads(done.output.splitlines()[-1]) == {
        "event": "prepared",
        "model": folder,
        "num_layers": num_layers,
        "kind": kind,
    }


def test_no_block_stays_at_home() -> None:
    assert swarm()._local_layers({"model": "wan", "kind": "video"}) == (0, 0)
    assert swarm()._local_layers({"model": "smollm2", "kind": "text"}) == (1, 0)
    with pytest.raises(CommandError, match="for text models; wan is none"):
        swarm(opt.Ends.REMOTE)._local_layers({"model": "wan", "kind": "video"})


@pytest.mark.parametrize(("is_diffusion", "status"), [(False, "ready"), (True, "no node serves layers 0:1")])
def test_a_first_block_that_nobody_holds_is_missed(
    is_diffusion: bool, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    holders = (0, 1, 1)
    _print_swarm([ModelStatus("tiny", DIGEST, 3, holders, False, False, is_diffusion=is_diffusion)])
    assert status in capsys.readouterr().out
