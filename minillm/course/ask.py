"""The widget of a prediction: a log slider, a typed number, a button that commits it."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from minillm.course.live import claim

if TYPE_CHECKING:
    from minillm.course.predictions import Prediction


def ask(prediction: Prediction) -> w.VBox:
    """Build the widget; a second call for the same prediction closes the first widget."""
    from minillm.course.predictions import parse_number, short

    wide = w.Layout(width="28em")
    if prediction.log:
        low, high = math.log10(prediction.low), math.log10(prediction.high)
        middle = 10 ** ((low + high) / 2)
        slider: Any = w.FloatLogSlider(middle, base=10, min=low, max=high, step=0.02, readout=False, layout=wide)
    else:
        middle = (prediction.low + prediction.high) / 2
        step = (prediction.high - prediction.low) / 200
        slider = w.FloatSlider(middle, min=prediction.low, max=prediction.high, step=step, readout=False, layout=wide)
    field = w.Text(placeholder="slide or type", layout=w.Layout(width="9em"))
    unit, button = w.Label(prediction.unit), w.Button(description="Commit", button_style="primary")
    said = w.HTML()

    def slide(change: Any) -> None:
        field.value = short(change["new"])

    def commit(_: Any) -> None:
        try:
            value = parse_number(field.value)
            prediction.commit(value)
        except ValueError as error:
            said.value = f"<span role='alert'>{html.escape(str(error))}</span>"
            return
        slider.unobserve(slide, "value")  # the slider follows what was typed; it must not round it
        slider.value = min(max(value, prediction.low), prediction.high)
        slider.observe(slide, "value")
        show()

    def show() -> None:
        record = prediction.record
        value, measured = record.get("value"), record.get("measured")
        if value is not None:
            field.value = short(value)
            again = "It is revealed and stands." if measured is not None else "You may change it until you measure."
            late = " You had seen the measurement: it does not count." if record.get("late") else ""
            said.value = f"Committed: <b>{short(value)} {html.escape(prediction.unit)}</b>. {again}{late}"
        settled = value is not None and measured is not None
        for widget in (slider, field, button):
            widget.disabled = settled

    slider.observe(slide, "value")
    button.on_click(commit)
    show()
    question = w.HTML(f"<b>Predict.</b> {html.escape(prediction.question)}")
    return claim(f"predict {prediction.id}", w.VBox([question, w.HBox([slider, field, unit, button]), said]))
