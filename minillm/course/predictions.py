"""Predict before you measure: commit a number, see how far off it was, and learn over the chapters how well you estimate."""

from __future__ import annotations

import html
import math
import re
import statistics
from dataclasses import dataclass
from typing import Any

from minillm.course.progress import Progress, now
from minillm.course.session import headless

CLOSE = 1.1  # a factor up to here is called "within 10 %"


def short(x: float) -> str:
    """A number for people: three significant digits, thousands separated, no exponent between 0.001 and a billion."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    if not 1e-3 <= abs(x) < 1e9:
        return f"{x:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    text = f"{round(x, 2 - math.floor(math.log10(abs(x)))):,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_number(text: str) -> float:
    """Read what a learner types: "1500", "1,500", "1.5e3", "1 500". ValueError names anything else."""
    cleaned = re.sub(r"(?<=\d)[,_\s](?=\d{3})", "", text.strip())
    try:
        value = float(cleaned)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; write it like 1500 or 1.5e3") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def verdict(predicted: float, measured: float, unit: str, log: bool) -> str:
    """The distance in words: a factor where both are positive, a difference otherwise or on a linear scale."""
    if predicted == measured:
        return "Exactly right."
    side = "high" if predicted > measured else "low"
    if not log or predicted <= 0 or measured <= 0:
        return f"That is {short(abs(predicted - measured))} {unit} too {side}."
    factor = max(predicted / measured, measured / predicted)
    return "Within 10 %." if factor <= CLOSE else f"That is {short(factor)} times too {side}."


class Prediction:
    """A question and the number committed to it; shown as a slider with a text field, or as a line where nobody can answer."""

    def __init__(self, id: str, question: str, unit: str, log: bool, reference: float, low: float, high: float, store: Progress):
        self.id, self.question, self.unit, self.log, self.low, self.high = id, question, unit, log, low, high
        self.reference, self._store, self._headless = reference, store, headless()

    @property
    def record(self) -> dict[str, Any]:
        """What the progress file holds: value, time, measured, late; empty when nothing is committed or revealed yet."""
        return self._store.read()["predictions"].get(self.id, {})

    @property
    def value(self) -> float | None:
        """The committed number; the reference where nobody can answer."""
        value = self.record.get("value")
        return self.reference if value is None and self._headless else value

    def commit(self, value: float) -> None:
        """Store the number and the time. After its reveal a first number is marked late, a second one is refused (ValueError)."""
        if not math.isfinite(value) or (self.log and value <= 0):
            raise ValueError(f"a prediction of {self.id} must be a {'positive' if self.log else 'finite'} number, got {value!r}")
        with self._store.change() as data:
            entry = data["predictions"].setdefault(self.id, {})
            if entry.get("value") is not None and "measured" in entry:
                raise ValueError(f"{self.id} is revealed: you predicted {short(entry['value'])} {self.unit}, and that stands")
            entry.update(value=value, time=now(), unit=self.unit, log=self.log, question=self.question)
            entry["late"] = "measured" in entry

    def __repr__(self) -> str:
        if self.record.get("value") is not None:
            return f"{self.question} You predicted {short(self.record['value'])} {self.unit}."
        if self._headless:
            return f"{self.question} Nobody to ask in this run; the reference guess is {short(self.reference)} {self.unit}."
        return f"{self.question} (in {self.unit})"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        if self._headless:
            return {"text/plain": repr(self)}
        from minillm.course.ask import ask  # ipywidgets only where there is a front end

        bundle = ask(self)._repr_mimebundle_() or {}
        return {**bundle, "text/plain": repr(self)} if isinstance(bundle, dict) else bundle


def predict(
    id: str, question: str, unit: str, log: bool = True, *, reference: float, low: float = 0.1, high: float = 10_000.0,
    progress: Progress | None = None,
) -> Prediction:
    """Ask the learner for a number before it is measured.

    id: notebook and name, "0.1 ridge". log: the slider runs over powers of ten from ``low`` to ``high``, and the answer is
    judged as a factor. reference: the guess that a run without a front end uses; it must lie between low and high.
    """
    if not re.fullmatch(r"\d+\.\d+ \S.*", id):
        raise ValueError(f"a prediction's id is notebook and name, like '0.1 ridge', got {id!r}")
    if not (low < high and low <= reference <= high) or (log and low <= 0):
        raise ValueError(f"{id}: need low <= reference <= high (low > 0 on a log scale), got {low}, {reference}, {high}")
    return Prediction(id, question, unit, log, reference, low, high, progress or Progress())


@dataclass(frozen=True)
class Reveal:
    """A prediction beside the measurement."""

    id: str
    predicted: float | None
    measured: float
    unit: str
    text: str

    @property
    def factor(self) -> float | None:
        """How many times too high or too low, at least 1; None without a prediction or for numbers that are not positive."""
        if self.predicted is None or self.predicted <= 0 or self.measured <= 0:
            return None
        return max(self.predicted / self.measured, self.measured / self.predicted)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<p><b>Prediction and measurement.</b> {html.escape(self.text)}</p>"


def reveal(id: str | Prediction, measured: float, *, progress: Progress | None = None) -> Reveal:
    """Show the committed number beside the measured one, in the same unit, and record how far apart they are.

    Takes the Prediction that ``predict`` returned, or its id when it was committed in an earlier session.
    """
    asked = id if isinstance(id, Prediction) else None
    key, measured = (asked.id if asked else str(id)), float(measured)
    if not math.isfinite(measured):
        raise ValueError(f"{key}: measured must be a finite number, got {measured!r}")
    store = progress or (asked._store if asked else Progress())
    with store.change() as data:
        entry = data["predictions"].setdefault(key, {})
        if asked:
            entry.setdefault("unit", asked.unit)
            entry.setdefault("log", asked.log)
        entry.update(measured=measured, measured_time=now())
    unit, log, value = entry.get("unit", ""), entry.get("log", True), entry.get("value")
    found = f"measured: {short(measured)} {unit}".rstrip() + "."
    if value is not None:
        late = " It was committed after the reveal and does not count." if entry.get("late") else ""
        text = f"You predicted {short(value)} {unit}; {found} {verdict(value, measured, unit, log)}{late}"
    elif asked and asked._headless:
        value = asked.reference
        text = f"The reference guess was {short(value)} {unit}; {found} {verdict(value, measured, unit, log)}"
    else:
        text = f"No prediction was committed; {found} Commit one above before you run this cell next time."
    return Reveal(key, value, measured, unit, text)


@dataclass(frozen=True)
class Calibration:
    """How well a chapter's predictions fitted: the median factor, and how often it was at most 2."""

    chapter: str
    count: int
    median_factor: float
    within_two: int


def calibration(progress: Progress | None = None) -> list[Calibration]:
    """One entry per chapter with revealed predictions that are judged by a factor; late ones do not count."""
    factors: dict[str, list[float]] = {}
    for id, entry in (progress or Progress()).read()["predictions"].items():
        value, measured = entry.get("value"), entry.get("measured")
        if entry.get("late") or not entry.get("log", True) or not value or not measured or value <= 0 or measured <= 0:
            continue
        factors.setdefault(id.split(".")[0], []).append(max(value / measured, measured / value))
    return [
        Calibration(chapter, len(f), statistics.median(f), sum(x <= 2 for x in f))
        for chapter, f in sorted(factors.items(), key=lambda item: int(item[0]))
    ]
