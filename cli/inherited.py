"""What the children of `diffuse up` take from the environment: they are a swarm by themselves, of this machine alone.

Where its user's other services listen, whom they join and what they serve is none of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cli import panels
from cli.setting_names import CONFIG_VARIABLE, variable_of

_FOR_THE_GATEWAY: Final = frozenset(
    {panels.KEYS, panels.LIMITS, panels.DEADLINES, panels.MEDIA, panels.STORAGE, panels.LOGS}
)
_FOR_A_NODE: Final = frozenset({panels.STORAGE, panels.LOGS})
_GATEWAY_ALONE: Final = frozenset({"model_aliases"})  # of panels that it does not inherit
_NOT_INHERITED: Final = frozenset({"metrics", "metrics_open"})  # every node would want the same port


def child_environment(command: str, known: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Variables that a child gets besides its parent's: those that it must not see are empty, which is unset."""
    kept = _FOR_THE_GATEWAY if command == "serve" else _FOR_A_NODE
    alone = _GATEWAY_ALONE if command == "serve" else frozenset()
    hidden = (
        name
        for name, option in known.get(command, {}).items()
        if name in _NOT_INHERITED or (option.rich_help_panel not in kept and name not in alone)
    )
    return {CONFIG_VARIABLE: "none", **dict.fromkeys(map(variable_of, hidden), "")}
