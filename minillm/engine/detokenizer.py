"""Text as it grows: half a character waits for its other half, and a stop string is never shown in part."""

from __future__ import annotations

from typing import Protocol, Sequence

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Incremental decoding of one request's output. ``text`` is what may be shown; it only ever grows until ``finish``."""

    def __init__(self, decoder: Decoder | None, stop: Sequence[str] = ()):
        self._decoder = decoder
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._window = 0  # decoding starts here: context for the first new token
        self._read = 0  # tokens before this are in _decoded
        self._decoded = ""
        self._ends: list[int] = []  # characters decoded after each token
        self._taken = 0
        self.text = ""
        self.stopped = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def take_delta(self) -> str:
        """The text that is new since the last call."""
        delta, self._taken = self.text[self._taken :], len(self.text)
        return delta

    def feed(self, token_id: int) -> None:
        """One more token. Sets ``stopped`` when it completes a stop string; text and token_ids are then cut in front of it."""
        self._ids.append(token_id)
        if self._decoder is not None:
            self._decode(final=False)
        self._ends.append(len(self._decoded))
        self._publish()

    def finish(self) -> None:
        """No more tokens: show what was held back."""
        if self.stopped:
            return
        if self._decoder is not None and self._read < len(self._ids):
            self._decode(final=True)
            self._ends[-1:] = [len(self._decoded)]
            self._publish()
        if not self.stopped:
            self.text = self._decoded

    def _decode(self, final: bool) -> None:
        assert self._decoder is not None
        before = self._decoder.decode(self._ids[self._window : self._read])
        after = self._decoder.decode(self._ids[self._window :])
        if after.endswith(REPLACEMENT) and not final:
            return  # the bytes of a character are not complete yet
        self._decoded += after[len(before) :]
        self._window, self._read = self._read, len(self._ids)

    def _publish(self) -> None:
        cut = self._find_stop()
        if cut is None:
            self.text = self._decoded[: len(self._decoded) - self._held_back()]
            return
        self.stopped = True
        self.text = self._decoded[:cut]
        # keep the tokens that begin in front of the cut
        starts = [0, *self._ends[:-1]]
        self._ids = [t for t, start in zip(self._ids, starts, strict=True) if start < cut]

    def _find_stop(self) -> int | None:
        # text before self.text's end was searched already, and a match can begin at most in what was held back
        found = [i for s in self._stop if (i := self._decoded.find(s, len(self.text))) >= 0]
        return min(found, default=None)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for s in self._stop:
            for n in range(min(len(s) - 1, len(self._decoded) - len(self.text)), longest, -1):
                if self._decoded.endswith(s[:n]):
                    longest = n
                    break
        return longest
