"""A guest's quota: sessions at once at the node where its routes begin."""

from __future__ import annotations

from pathlib import Path

from routing.allow_list import AllowList
from routing.errors import ErrorCode
from routing.guest_token import sign_guest_token
from routing.identity import Identity
from routing.types import Capabilities
from tests.node.fake_runner import NUM_LAYERS
from tests.node.rig import NETWORK_ID, Rig


async def test_a_guest_has_no_more_sessions_than_its_token_says(rig: Rig, tmp_path: Path) -> None:
    issuer, path = Identity.generate(), tmp_path / "allow"
    path.write_text(f"issuer {issuer.public_key.hex()}")
    allow = AllowList(path, NETWORK_ID, now=lambda: 1_800_000_000)
    token = sign_guest_token(issuer, NETWORK_ID, client_id=None, now_s=1_800_000_000, lifetime_s=60, quota=1)
    node = await rig.add_fake_node(allow=allow)
    scripts = [rig.script((node, 0, NUM_LAYERS)) for _ in range(2)]
    assert allow(rig.gateway.identity.node_id, Capabilities(token=token))
    for script in scripts:
        await script.open()
    failure = await scripts[1].failure()
    assert (failure.code, failure.session_id) == (ErrorCode.BUSY, scripts[1].session_id)
