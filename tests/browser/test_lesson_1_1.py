"""Lesson 1.1 in a real JupyterLab: all cells run, and the panel's slider re-runs the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "1_skip" / "1_kv_cache.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_where_the_slider_stops(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_kv_cache.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.decode_panel(bench")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("position 128, batch 1", timeout=MEASURED_MS)
    expect(said).to_contain_text("factor predicted", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowLeft")
    expect(said).to_contain_text("position 64, batch 1", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    assert panel.locator(".widget-image").count() == 1, "one picture, replaced in place"
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_1_1")
    assert not book.errors
