"""Lesson 0.1 in a real JupyterLab: all cells run, and the panel measures where the sliders stop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "0_bottleneck" / "1_roofline.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_the_product_where_the_sliders_stop(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_roofline.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("panel = roofline_panel(machine)")
    said, picture = panel.locator(".verdict"), panel.locator(".widget-image").first

    def measured(rows: str) -> str:
        """Wait for this position; the picture's address changes with its bytes."""
        wanted = re.compile(f"^{rows}: the roofline predicts .*-bound; measured .*of the roof", re.S)
        expect(said).to_contain_text(wanted, timeout=MEASURED_MS)
        return picture.get_attribute("src")

    pictures = [measured("1 row")]
    for rows in ("2 rows", "4 rows"):
        book.press(panel, "ArrowRight")
        pictures.append(measured(rows))
    assert len(set(pictures)) == 3, "the picture did not follow the keys"
    assert panel.locator(".widget-image").count() == 1, "one picture, replaced in place"
    picture.scroll_into_view_if_needed()
    book.screenshot("lesson_0_1")
    assert not book.errors
