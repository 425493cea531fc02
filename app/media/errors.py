"""What can go wrong with files: those made of what a model made, and those that somebody sent."""

from __future__ import annotations


class MediaError(Exception):
    """Pictures or samples cannot be put into the file that was asked for; the text holds nothing of them."""


class UnusableMediaError(MediaError):
    """A picture or recording that somebody sent cannot be used: their mistake. The text holds nothing of it."""
