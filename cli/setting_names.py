"""What a setting is called: the flag, the variable and the file's key of a command's parameter are one name.

Knows also which parameter fills a field of the settings' models, where the two are called differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PREFIX: Final = "DIFFUSE_"
CONFIG_VARIABLE: Final = "DIFFUSE_CONFIG"
# Parameters that say how a command is run once, not how a service is set up.
NO_SETTINGS: Final = frozenset({"config", "help", "listen_fd", "until_eof"})
# What a command that only asks has in common with services: its other flags belong to one call.
SHARED: Final = frozenset({"api_key", "state_dir", "tls_ca"})
# Never shown: whoever reads them may ask in our name. Of URLs only the part that lets one in is hidden.
SECRETS: Final = frozenset({"api_key", "api_keys"})
# Variables that no flag stands for.
OTHER_VARIABLES: Final = frozenset(
    {CONFIG_VARIABLE, "DIFFUSE_DEBUG", "DIFFUSE_KERNEL_CACHE", "DIFFUSE_PICTURE_MODEL"}
)

_PARAMETERS: Final = {
    "host": "listen",
    "port": "listen",
    "key_path": "key",
    "kv_budget_bytes": "kv_budget",
    "memory_bytes": "memory",
    "models": "model",
    "bootstraps": "bootstrap",
    "nodes": "node",
    "psk": "psk_file",
    "accepted_psks": "psk_file",
    "token": "token_file",
    "allow": "allow_file",
    "owner": "owner_key",
    "is_sentinel": "sentinel",
}


def parameter_of(field: str) -> str:
    """The parameter that fills a field of the settings' models: its name, without the unit at its end."""
    return _PARAMETERS.get(field) or field.removesuffix("_s")


def flag_of(parameter: str) -> str:
    """How it is written on the command line."""
    return "--" + parameter.replace("_", "-")


def variable_of(parameter: str) -> str:
    """How it is written in the environment."""
    return PREFIX + parameter.upper()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What a text about an unknown name ends with: the nearest known one, or nothing."""
    import difflib  # only who has misspelled something waits for it

    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
