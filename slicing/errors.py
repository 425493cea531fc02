"""What can be wrong with a model that a user named; every text says what to do about it.

Knows nothing of networks or sessions: the node and the gateway translate these at their own edge.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be found, read or used; the text names the file or setting and how to mend it."""


class LogitsError(ModelError):
    """A model yielded logits that hold no choice: a NaN, an infinity at the top, or nothing but -inf."""
