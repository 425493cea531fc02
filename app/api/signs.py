"""What the events of each kind of answer say of its progress, for its deadlines."""

from __future__ import annotations

from math import inf
from typing import Any, Final

from app.engine.diffusion.request import Decoding, Made, Preview, StepDone
from app.engine.embedding_request import Embedded, EmbeddingFinished
from app.engine.request import Finished, PrefillProgress, TextDelta
from app.engine.speech import Transcribed, WindowDone
from app.engine.watch import Deadlines, Sign
from app.settings import GatewaySettings

# What is not listed says nothing: the answer was taken, and may wait for its turn and its route.
_SIGNS: Final[dict[type, Sign]] = {
    PrefillProgress: Sign.LIFE,
    TextDelta: Sign.OUTPUT,
    StepDone: Sign.OUTPUT,
    Preview: Sign.OUTPUT,
    Decoding: Sign.LAST_WORK,
    WindowDone: Sign.OUTPUT,
    Embedded: Sign.OUTPUT,
    Finished: Sign.END,
    Made: Sign.END,
    Transcribed: Sign.END,
    EmbeddingFinished: Sign.END,
}


def deadlines_of(settings: GatewaySettings) -> Deadlines:
    """The deadlines that settings name; 0 is none."""
    return Deadlines(_sign_of, settings.first_token_timeout_s or inf, settings.stall_timeout_s or inf)


def _sign_of(event: Any) -> Sign:
    if type(event) is tuple:  # an answer of several that one generator makes in turn, with its index
        event = event[1]
    if isinstance(event, PrefillProgress) and event.scores:
        return Sign.OUTPUT  # a prompt that is scored
    return _SIGNS.get(type(event), Sign.NONE)
