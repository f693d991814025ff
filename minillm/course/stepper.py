"""A recorded run, frame by frame: play, step forward, step back."""

from __future__ import annotations

import html
import re
from typing import Any, Callable, Sequence

import ipywidgets as w
from matplotlib.figure import Figure

from minillm.course.live import LiveView
from minillm.course.style import png

INTERVAL_MS = 900
"""Time between two frames while it plays."""


class Stepper(LiveView):
    """Shows frame i of a recording and moves through it; nothing is computed anew but the picture.

    frames: whatever was recorded, one per step. draw(frame, i): (Figure or PNG bytes, caption) of frame i. The pictures of frames
    that were seen are kept. still: the frame that readers without a front end see, the last by default.
    """

    def __init__(
        self, name: str, frames: Sequence[Any], draw: Callable[[Any, int], tuple[Figure | bytes, str]], still: int = -1
    ) -> None:
        if not frames:
            raise ValueError(f"{name}: a recording needs at least one frame")
        if not -len(frames) <= still < len(frames):
            raise ValueError(f"{name}: still is frame {still} of {len(frames)}")
        self.frames, self._draw = list(frames), draw
        self._seen: dict[int, tuple[bytes, str]] = {}
        last = len(frames) - 1
        self.play = w.Play(value=0, min=0, max=last, interval=INTERVAL_MS, show_repeat=False)
        self.slider = w.IntSlider(value=0, min=0, max=last, description="frame", layout=w.Layout(width="24em"))
        self.back = w.Button(icon="step-backward", tooltip="one frame back", layout=w.Layout(width="3em"))
        self.forward = w.Button(icon="step-forward", tooltip="one frame on", layout=w.Layout(width="3em"))
        super().__init__(name, [self.play, self.back, self.forward, self.slider])
        self.back.on_click(lambda _: self.go(self.slider.value - 1))
        self.forward.on_click(lambda _: self.go(self.slider.value + 1))
        self.play.observe(self._moved, "value")
        self.slider.observe(self._moved, "value")
        self.go(still % len(frames) if self._headless else 0)
        self._show()

    @property
    def frame(self) -> int:
        """Number of the frame that is shown."""
        return int(self.slider.value)

    def go(self, frame: int) -> None:
        """Show a frame; beyond either end, the one at the end."""
        self.slider.value = min(max(frame, 0), len(self.frames) - 1)

    def close(self) -> None:
        if not self._closed:
            for control in (self.play, self.slider):
                control.unobserve_all()
            super().close()

    def _moved(self, change: Any) -> None:
        for control in (self.play, self.slider):  # whichever moved takes the other along
            control.value = change["new"]
        self._show()

    def _show(self) -> None:
        i = self.frame
        if i not in self._seen:
            drawn, caption = self._draw(self.frames[i], i)
            below = html.unescape(re.sub(r"<[^>]*>", "", caption)) if self._headless else None
            self._seen[i] = (png(drawn, below) if isinstance(drawn, Figure) else drawn, caption)
        self.picture.value, caption = self._seen[i]
        self.verdict.value = f"<span class='frame'>{i + 1} of {len(self.frames)}: {caption}</span>"

    def __repr__(self) -> str:
        return f"{self.name}: {len(self.frames)} recorded frames; run this cell in JupyterLab to play them"
