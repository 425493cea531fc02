"""What `doctor` concludes from what nodes say."""

from __future__ import annotations

from cli.diagnosis import Finding, HomeParts, OwnModel, examine
from cli.survey import NodeReport
from routing.errors import ErrorCode, LinkError, SecurityError
from routing.types import Description, NodeAddress, NodeId, SliceOffer, SliceSpec, WireDtype

DIGEST = b"d" * 32


def offer(
    start: int,
    end: int,
    *,
    digest: bytes = DIGEST,
    salt: bytes = b"",
    opening: bool = False,
    closing: bool = False,
) -> SliceOffer:
    hashes = tuple(bytes([layer]) * 7 + (salt or b"\0") for layer in range(start, end))
    return SliceOffer(
        "tiny",
        digest,
        30,
        64,
        SliceSpec(start, end),
        WireDtype.FLOAT32,
        "plain/fp32/cpu",
        opening,
        closing,
        1.0,
        hashes,
    )


def node(number: int, *offers: SliceOffer) -> NodeReport:
    address = NodeAddress(NodeId(bytes([number]) * 32), "10.0.0.1", 7000 + number)
    return NodeReport(address, Description(offers), rtt_ms=0.5)


def problems(findings: list[Finding]) -> list[str]:
    return [f"{finding.subject}: {finding.text}" for finding in findings if finding.level == "problem"]


def test_a_whole_swarm_has_no_problem() -> None:
    reports = [node(1, offer(1, 11)), node(2, offer(11, 21)), node(3, offer(21, 30)), node(4, offer(11, 21))]
    assert problems(examine(reports, HomeParts(1, 0))) == []


def test_the_missing_layers_are_named_exactly() -> None:
    reports = [node(1, offer(1, 11)), node(3, offer(15, 28))]
    told = problems(examine(reports, HomeParts(1, 0)))
    assert told == [
        "tiny: no node serves layers 11:15, 28:30: "
        "start `diffuse host --model tiny --layers 11:15` and `diffuse host --model tiny --layers 28:30`"
    ]


def test_layers_at_home_are_not_missed() -> None:
    assert problems(examine([node(1, offer(2, 27))], HomeParts(2, 3))) == []


def test_the_thin_mode_misses_the_ends() -> None:
    told = problems(examine([node(1, offer(0, 30))], HomeParts(is_thin=True)))
    assert [text.partition(":")[2].partition(":")[0].strip() for text in told] == [
        "no node embeds tokens",
        "no node keeps the head",
    ]
    whole = node(1, offer(0, 30, opening=True, closing=True))
    assert problems(examine([whole], HomeParts(is_thin=True))) == []


def test_an_unreachable_node_is_named_by_its_port_and_told_what_to_check() -> None:
    address = node(2).address
    gone = NodeReport(address, error=LinkError(ErrorCode.TIMEOUT, "no answer"))
    wrong = NodeReport(address, error=SecurityError(ErrorCode.ID_MISMATCH, "another identity answers"))
    for report, advice in ((gone, "is its port open"), (wrong, "copy the whole id@host:port")):
        told = examine([report], HomeParts())[0]
        assert told.level == "problem"
        assert told.subject == "node 02020202 at 10.0.0.1:7002"
        assert advice in told.text


def test_replicas_that_loaded_other_weights_are_named_with_the_layers() -> None:
    reports = [node(1, offer(1, 30)), node(2, offer(11, 13, salt=b"x"))]
    told = problems(examine(reports, HomeParts()))
    assert told == [
        "tiny: node 01010101 at 10.0.0.1:7001 and node 02020202 at 10.0.0.1:7002 hold different weights "
        "for layers 11:13: reload one"
    ]


def test_a_node_with_another_model_than_ours_is_named_with_both() -> None:
    reports = [node(1, offer(1, 30)), node(2, offer(1, 30, digest=b"\x02" * 32))]
    own = OwnModel("mine", reports[0].description.slices[0].model_digest)  # type: ignore[union-attr]
    told = problems(examine(reports, HomeParts(1, 0), own))
    assert told[0] == (
        f"node {'02' * 4} at 10.0.0.1:7002: serves tiny ({'02' * 6}), but mine here is {own.digest.hex()[:12]}: "
        "give both sides the same --model files"
    )


def test_two_models_under_one_name_are_told_apart() -> None:
    reports = [node(1, offer(1, 11)), node(2, offer(11, 30, digest=b"e" * 32))]
    assert any(
        "nodes hold different models of this name" in text for text in problems(examine(reports, HomeParts()))
    )


def test_nobody_serving_anything_is_a_problem() -> None:
    assert problems(examine([node(1)], HomeParts())) == ["layers: no node serves any layer"]
