"""Lesson 1.3 in a real JupyterLab: all cells run, and the panel follows the length of the prefix and the tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "1_skip" / "3_tiered_cache.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_the_length_and_the_tier_that_were_chosen(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("3_tiered_cache.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.tier_panel(bench")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("256 tokens", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as fast", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    for handle, expected in ((0, "128 tokens"), (1, "loaded from disk")):
        book.press(panel, "ArrowLeft" if handle == 0 else "ArrowRight", handle)
        expect(said).to_contain_text(expected, timeout=MEASURED_MS)
        expect(said).to_contain_text("times as fast", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "the picture or the verdict stayed as it was"
    assert panel.locator(".widget-image").count() == 1, "one picture, replaced in place"
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_1_3")
    assert not book.errors
