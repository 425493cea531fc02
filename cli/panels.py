"""The headings that flags stand under in the help, in the order that settings are listed in."""

from __future__ import annotations

from typing import Final

NETWORK: Final = "Network"
MODELS: Final = "Models"
KEYS: Final = "Keys"
LIMITS: Final = "Limits"
DEADLINES: Final = "Deadlines"
MEDIA: Final = "Media"
STORAGE: Final = "Storage"
TLS: Final = "TLS"
LOGS: Final = "Logs and metrics"
PANELS: Final = (NETWORK, MODELS, KEYS, LIMITS, DEADLINES, MEDIA, STORAGE, TLS, LOGS)
