"""Lesson 4.2 in a real JupyterLab: all cells run, and the panel measures again where its slider stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "4_occupy_less" / "2_gqa_mla.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_measures_where_the_slider_stops(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("2_gqa_mla.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.context_panel(made")
    said = panel.locator(".verdict")
    expect(said).to_contain_text("fastest", timeout=MEASURED_MS)
    book.press(panel, "ArrowLeft")
    expect(said).to_contain_text("context 4096", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    book.screenshot("lesson_4_2")
    assert not book.errors
