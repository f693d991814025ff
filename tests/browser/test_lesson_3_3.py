"""Lesson 3.3 in a real JupyterLab: the panel's sliders re-run the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "3_move_less" / "3_kv_quantisation.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_where_the_sliders_stop(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("3_kv_quantisation.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.context_panel(made")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("context 64, 4 rows, int8", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as fast as 16 bits", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(said).to_contain_text("context 256, 4 rows, int8", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_3_3")
    assert not book.errors
