"""Lesson 4.1 in a real JupyterLab: all cells run, the block tables are stepped through, and the panel measures again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "4_occupy_less" / "1_paged_cache.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_tables_are_stepped_and_the_panel_measures_where_the_slider_stops(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_paged_cache.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.attention_panel(bench")
    said = panel.locator(".verdict")
    expect(said).to_contain_text("times as long", timeout=MEASURED_MS)
    tables = book.cell("Stepper(")
    frame = tables.locator(".frame")
    expect(frame).to_contain_text("1 of", timeout=MEASURED_MS)
    tables.locator("button[title='one frame on']").click()
    expect(frame).to_contain_text("copied to", timeout=MEASURED_MS)
    book.press(panel, "ArrowLeft")
    expect(said).to_contain_text("context 512", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    book.screenshot("lesson_4_1")
    assert not book.errors
