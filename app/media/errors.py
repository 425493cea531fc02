"""What can go wrong with making a file of what a model made."""

from __future__ import annotations


class MediaError(Exception):
    """Pictures or samples cannot be put into the file that was asked for; the text holds nothing of them."""
