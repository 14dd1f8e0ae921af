"""The one exception that is Tilewise's own."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """What was asked is legal, but no kernel on this machine does it; the message lists every reason."""
