"""Lesson 2.1 in a real JupyterLab: the panel's slider re-runs the measurement of all formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "2_compute_less" / "1_w8a8.ipynb"
MEASURED_MS = 300_000  # the whole lesson up to the panel runs first, and quantises the model twice


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_where_the_slider_stops(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_w8a8.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.tokens_panel(made")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("1 token in the step", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as fast", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(said).to_contain_text("2 tokens in the step", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_2_1")
    assert not book.errors
