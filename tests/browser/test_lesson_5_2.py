"""Lesson 5.2 in a real JupyterLab: all cells run, and the panel's slider re-runs the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "5_saturate" / "2_chunked_prefill.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_where_the_slider_stops(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("2_chunked_prefill.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.chunk_panel(bench")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("chunks of 128", timeout=MEASURED_MS)
    expect(said).to_contain_text("Against prefill first", timeout=MEASURED_MS)
    picture = image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(said).to_contain_text("chunks of 256", timeout=MEASURED_MS)
    expect(said).to_contain_text("in 2 steps", timeout=MEASURED_MS)
    assert image.get_attribute("src") != picture, "the picture did not follow the key"
    assert panel.locator(".widget-image").count() == 1, "one picture, replaced in place"
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_5_2")
    assert not book.errors
