"""Where an answer ends: stop strings in a stream of text, and the reason that is reported.

Text that could be the beginning of a stop string is held back until it is known not to be one.
What comes out does not depend on how the text was cut into pieces, so tokens that come several a
step end an answer at the same character as tokens that come one by one. One matcher a request;
token ids and their text are for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


class StopChecker:
    """Passes text on up to the first stop string to be complete (of two, the one begun earlier)."""

    def __init__(self, stop: Sequence[str]) -> None:
        assert not isinstance(stop, str) and all(stop), "an empty stop string is everywhere"
        self._stop = tuple(stop)
        self._held = ""  # the longest end of the text so far that begins a stop string
        self.stopped = False

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(Text that may be shown now, whether a stop string was met).

        Not armed (an answer below its min_tokens), text passes and is forgotten: a stop string must
        lie wholly in text pushed while armed. Nothing follows the push that stopped.
        """
        assert not self.stopped, "text after the stop string"
        text = self._held + text
        if not armed:
            self._held = ""
            return text, False
        # (end, start) of every stop string's first place: the smallest is complete first.
        places = [(text.find(s) + len(s), text.find(s)) for s in self._stop if s in text]
        if places:
            self._held = ""
            self.stopped = True
            return text[: min(places)[1]], True
        shown = len(text) - self._begun(text)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """The text still held back, when the answer ends for another reason than a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=0) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(s.startswith(end) for s in self._stop):
                return size
        return 0


def finish_reason(
    *, met_stop_id: bool, met_stop_text: bool, num_output: int, max_tokens: int | None
) -> Literal["stop", "length"] | None:
    """Why the answer ends at this token, if it does; a stop at the last allowed one is a stop."""
    if met_stop_id or met_stop_text:
        return "stop"
    if max_tokens is not None and num_output >= max_tokens:
        return "length"
    return None
