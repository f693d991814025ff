"""Lesson 2.3 in a real JupyterLab: all cells run, and the panel measures where its sliders stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "2_compute_less" / "3_moe.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_measures_where_the_sliders_stop(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("3_moe.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.layer_panel(bench")
    said = panel.locator(".verdict")
    expect(said).to_contain_text("32 tokens, top 8 of 64", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as long", timeout=MEASURED_MS)
    book.press(panel, "ArrowLeft")
    expect(said).to_contain_text("16 tokens", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    book.screenshot("lesson_2_3")
    assert not book.errors
