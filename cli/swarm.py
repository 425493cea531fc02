"""What the flags of a member say, as settings of its network: the same for sentinel, status and doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cli.membership import Membership
from cli.options import Scope

if TYPE_CHECKING:
    from routing.network import NetworkSettings
    from routing.types import NodeAddress


def network_settings(
    membership: Membership, bootstraps: tuple[NodeAddress, ...], scope: Scope = Scope.AUTO, **others: Any
) -> NetworkSettings:
    """Settings of a member of this swarm. Names of hosts are looked up by the network, when it starts."""
    from routing import address_policy
    from routing.network import NetworkSettings

    return NetworkSettings(
        network_id=membership.network_id,
        psk=membership.psk,
        accepted_psks=membership.accepted_psks,
        bootstraps=bootstraps,
        tls=membership.tls,
        scope=None if scope is Scope.AUTO else address_policy.Scope(scope.value),
        **others,
    )
