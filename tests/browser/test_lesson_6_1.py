"""Lesson 6.1 in a real JupyterLab: all cells run, the passes can be stepped through, and the sliders give another speed-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "6_break_serial" / "1_speculative_decoding.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_sliders_of_the_lesson_give_another_speed_up(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_speculative_decoding.ipynb", CHAPTER)
    book.run_all()
    page = book.page
    panel = book.cell("prices.speedup_panel(bench")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("S = ", timeout=MEASURED_MS)
    before = book.found(said, r"E = [\d.]+", MEASURED_MS)
    picture = image.get_attribute("src")
    book.press(panel, "ArrowLeft", times=4)
    expect(said).not_to_contain_text(before, timeout=MEASURED_MS)
    expect(said).to_contain_text("S = ", timeout=MEASURED_MS)
    assert book.found(said, r"E = [\d.]+", MEASURED_MS) != before
    assert image.get_attribute("src") != picture, "the picture did not follow the key"
    assert panel.locator(".widget-image").count() == 1, "one picture, replaced in place"
    passes = book.cell("lab.trace(llm")
    expect(passes.locator(".verdict")).to_contain_text("pass 1: 0 drafted")
    passes.locator("button", has=page.locator(".fa-step-forward")).last.click()
    expect(passes.locator(".verdict")).to_contain_text("pass 2:")
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_6_1")
    assert not book.errors
