"""Lesson 5.1 in a real JupyterLab: all cells run, the recorded steps play, and the panel serves where the slider stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "5_saturate" / "1_continuous_batching.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_steps_play_and_the_panel_serves_where_the_slider_stops(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_continuous_batching.ipynb", CHAPTER)
    book.run_all()
    page = book.page
    panel = book.cell("lab.load_panel(load")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("4 slots, all at once", timeout=MEASURED_MS)
    expect(said).to_contain_text("tok/s", timeout=MEASURED_MS)
    picture = image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(said).to_contain_text("8 slots, all at once", timeout=MEASURED_MS)
    expect(said).to_contain_text("tok/s", timeout=MEASURED_MS)
    assert image.get_attribute("src") != picture and panel.locator(".widget-image").count() == 1
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_5_1_panel")

    stepper = book.cell("lab.timeline_stepper(served")
    frame, drawn = stepper.locator(".frame"), stepper.locator(".widget-image").first
    drawn.scroll_into_view_if_needed()
    expect(frame).to_contain_text("step 4.")
    before = drawn.get_attribute("src")
    stepper.locator("button", has=page.locator(".fa-step-forward")).last.click()
    expect(frame).to_contain_text("step 8.")
    assert drawn.get_attribute("src") != before
    book.screenshot("lesson_5_1_steps")
    assert not book.errors
