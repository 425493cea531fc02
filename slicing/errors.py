"""What can be wrong with a model that a user named; every text says what to do about it.

Knows nothing of networks or sessions: the node and the gateway translate these at their own edge.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be found, read or used; the text names the file or setting and how to mend it."""


class LogitsError(ModelError):
    """A model yielded logits that hold no choice: a NaN, an infinity at the top, or nothing but -inf."""


class CallError(ModelError):
    """Bytes that should hold a call of blocks, or its answer, do not; the text names what is wrong, no content."""


class CallTooLarge(CallError):
    """A call takes more memory than is free now; the text says how much."""


class CallUnknown(CallError):
    """A call speaks of something that was sent before, and it is not here: the sender must send it again."""
