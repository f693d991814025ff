"""A live panel: controls that re-run a measurement in the background, a picture, a verdict, and a still view for readers."""

from __future__ import annotations

import html
import re
import threading
import time
from typing import Any, Callable, Mapping

import ipywidgets as w
from matplotlib.figure import Figure

from minillm.course.live import LiveView
from minillm.course.style import png
from minillm.perf.workers import release_workers

_measuring = threading.Lock()  # two measurements at once would disturb each other
PROGRESS_SECONDS = 0.1  # at most ten progress messages a second
FIRST_PICTURE_SECONDS = 3.0


class Cancelled(Exception):
    """Raised inside a measurement whose controls have moved on."""


class Job:
    """One measurement on its way. The measuring function gets it as its first argument."""

    def __init__(self, values: dict[str, Any], report: Callable[["Job", float], None]) -> None:
        self.values = values
        self._cancel, self._report, self._said = threading.Event(), report, 0.0

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def cancel(self) -> None:
        self._cancel.set()

    def check(self) -> None:
        """Raise Cancelled when a newer measurement waits; call it between repeats."""
        if self.cancelled:
            raise Cancelled

    def progress(self, fraction: float) -> None:
        """Show how far the measurement is (0 to 1), and stop here if it is cancelled."""
        self.check()
        if time.monotonic() - self._said >= PROGRESS_SECONDS:
            self._said = time.monotonic()
            self._report(self, fraction)


class Panel(LiveView):
    """Controls, a picture and a verdict around one measurement.

    name: a cell that builds a panel of the same name again replaces this one. controls: name → ipywidgets control.
    measure(job, **values): runs in a worker thread; calls ``job.progress(fraction)`` between its repeats.
    draw(values, result): (Figure or PNG bytes, verdict); ``result`` is None before the measurement is there, so that the
    prediction is on the page at once. The newest control values win: an older measurement is cancelled, never queued.
    ``wait()`` blocks until the last measurement is shown: for tests and runs without a front end.
    """

    def __init__(
        self, name: str, controls: Mapping[str, Any], measure: Callable[..., Any],
        draw: Callable[[dict[str, Any], Any], tuple[Figure | bytes, str]],
    ) -> None:
        self.controls = dict(controls)
        self._measure, self._draw = measure, draw
        self._state = threading.Condition()
        self._newest: Job | None = None
        self._pending: Job | None = None
        self._busy = False
        self._error: Exception | None = None
        self.bar = w.FloatProgress(0.0, min=0.0, max=1.0, layout=w.Layout(width="14em", height="1em", visibility="hidden"))
        for control in self.controls.values():
            if control.has_trait("continuous_update"):
                control.continuous_update = False  # measure where the slider stops, not everywhere it passes
            control.layout.width = control.layout.width or "24em"
            control.observe(self._moved, "value")
        super().__init__(name, [*self.controls.values(), self.bar])
        self._moved()

    def __getitem__(self, control: str) -> Any:
        return self.controls[control]

    @property
    def values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def wait(self, timeout: float = 60.0) -> None:
        """Block until nothing is being measured. TimeoutError after ``timeout`` seconds; raises what the measurement raised."""
        with self._state:
            if not self._state.wait_for(lambda: not self._busy, timeout):
                raise TimeoutError(f"{self.name}: still measuring after {timeout:g} s")
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel what runs and close every widget of the panel."""
        with self._state:
            if self._closed:
                return
            self._closed, self._pending = True, None
            if self._newest:
                self._newest.cancel()
        for control in self.controls.values():
            control.unobserve(self._moved, "value")
        super().close()

    def _moved(self, _: Any = None) -> None:
        job = Job(self.values, self._progressed)
        with self._state:
            if self._closed:
                return
            if self._newest:
                self._newest.cancel()
            self._newest = self._pending = job
            self._error = None
            start, self._busy = not self._busy, True
        if start:
            release_workers()
            threading.Thread(target=self._work, name=f"panel {self.name}", daemon=True).start()

    def _work(self) -> None:
        """Run the pending job until there is none; then the thread ends."""
        while True:
            with self._state:
                job, self._pending = self._pending, None
                if job is None:
                    self._busy = False
                    self._state.notify_all()
                    return
            try:
                self._show(job, None)
                self._bar(job, 0.0, "visible")
                with _measuring:
                    job.check()
                    result = self._measure(job, **job.values)
                job.check()
                self._show(job, result)
            except Cancelled:
                continue
            except Exception as error:  # shown on the page: a thread's traceback would go nowhere
                self._fail(job, error)
            self._bar(job, 1.0, "hidden")

    def _show(self, job: Job, result: Any) -> None:
        drawn, verdict = self._draw(job.values, result)
        caption = re.sub(r"<[^>]*>", "", verdict) if self._headless else None
        image = png(drawn, html.unescape(caption) if caption else None) if isinstance(drawn, Figure) else drawn
        with self._state:
            if job is self._newest and not self._closed:
                self.picture.value = image  # replaced in place: the old picture stays until the new one is there
                self.verdict.value = verdict
                self._state.notify_all()

    def _fail(self, job: Job, error: Exception) -> None:
        with self._state:
            if job is self._newest and not self._closed:
                self._error = error
                what = html.escape(f"{type(error).__name__}: {error}")
                self.verdict.value = f"<span role='alert'>The measurement failed: {what}</span>"

    def _progressed(self, job: Job, fraction: float) -> None:
        self._bar(job, fraction, "visible")

    def _bar(self, job: Job, fraction: float, visibility: str) -> None:
        with self._state:
            if job is self._newest and not self._closed:
                self.bar.value, self.bar.layout.visibility = fraction, visibility

    def settle(self) -> None:
        """Without a front end, wait for the measurement; with one, for the prediction's picture, drawn within a moment."""
        if self._headless:
            self.wait()
        with self._state:
            self._state.wait_for(lambda: bool(self.picture.value) or not self._busy, FIRST_PICTURE_SECONDS)
