"""The course's widgets in a real JupyterLab: what a learner slides, types and clicks changes what they see."""

from __future__ import annotations

import json
from typing import Any, Callable

PANEL = """import time
import ipywidgets as w
from minillm.course.panel import Panel
from minillm.course.plots import Point, Roof, roofline

def measure(job, rows):
    for i in range(5):
        job.progress(i / 5)
        time.sleep(0.03)
    return max(rows * 2e6 / 9e10, 4e6 / 1.8e10)

def draw(values, seconds):
    rows = values["rows"]
    points = [Point(f"{rows} rows", rows * 2e6, 4e6, seconds, seconds * 0.9, seconds * 1.2)] if seconds else []
    found = f"measured {seconds * 1e6:.0f} µs" if seconds else "measuring"
    return roofline([Roof("toy machine", 1e11, 2e10)], points), f"<span class='said'>{rows} rows: {found}</span>"

panel = Panel("toy", {"rows": w.IntSlider(64, 16, 512, step=16, description="rows")}, measure, draw)
panel"""
SEEN = """from ipywidgets.widgets.widget import _instances
print(len(_instances), "widgets")"""


def picture(page: Any) -> str:
    """The address of the drawn image: it changes with its bytes."""
    return page.locator("img.widget-image, .widget-image img").first.get_attribute("src")


def test_a_panel_follows_its_slider_by_key_and_by_mouse(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("panel.ipynb", [PANEL, SEEN])
    book.run_all()
    page, said = book.page, book.page.locator(".said").first
    expect(said).to_contain_text("measured")
    before, first = said.text_content(), picture(page)
    handle = page.locator(".jupyter-widgets .noUi-handle").first
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("80 rows: measured")
    second = picture(page)
    assert said.text_content() != before and second != first, "the picture did not follow the key"

    box = handle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=6)
    page.mouse.up()
    expect(said).not_to_contain_text("80 rows")
    expect(said).to_contain_text("measured")
    assert picture(page) != second, "the picture did not follow the mouse"
    assert page.locator(".widget-image").count() == 1, "one picture, replaced in place"

    notebook = book.saved()
    assert "image/png" in notebook.cells[0].outputs[0].data, "readers on the web see the still picture"
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0 and not book.errors
    book.screenshot("panel")


PREDICT = """from minillm.course.predictions import predict, reveal
question = "From how many FLOP per byte is a toy machine bound by arithmetic?"
ridge = predict("0.1 ridge", question, "FLOP/B", reference=4, low=0.1, high=1000)
ridge"""
REVEAL = "reveal(ridge, 5)"
CHECK = """from minillm.course.checks import check
from minillm.course.expect import expect_equal
from minillm.course.task import NamedCheck, Task
task = Task("0.1 core", "The ridge", (NamedCheck("exact", lambda f: expect_equal(f(10, 2), 5)),), ("a", "b", "c"))
def ridge_of(flops, bandwidth):
    return flops * bandwidth
check(task, ridge_of)"""


def test_a_prediction_is_committed_and_revealed_and_a_red_check_is_readable(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("predict.ipynb", [PREDICT, REVEAL, CHECK])
    page = book.page
    book.idle()
    page.locator(".jp-Cell").first.click()
    page.keyboard.press("Shift+Enter")
    field = page.locator(".widget-text input").first
    field.fill("12,50")
    page.get_by_role("button", name="Commit").click()
    expect(page.locator(".jp-OutputArea").first).to_contain_text("is not a number")
    field.fill("20")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Commit").click()
    expect(page.locator(".jp-OutputArea").first).to_contain_text("Committed: 20 FLOP/B. You may change it until you measure.")
    slider = page.locator(".jupyter-widgets .noUi-handle").first
    expect(slider).to_have_attribute("aria-valuenow", "1.3")  # log10(20): the slider follows what was typed
    expect(field).to_have_value("20")
    for cell in (1, 2):
        page.locator(".jp-CodeCell").nth(cell).click()
        page.keyboard.press("Shift+Enter")
    shown = page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea")
    expect(shown).to_contain_text("You predicted 20 FLOP/B; measured: 5 FLOP/B. That is 4 times too high.")
    red = page.locator(".jp-CodeCell").nth(2).locator(".jp-OutputArea")
    expect(red).to_contain_text("Tested: yours, ridge_of(flops, bandwidth), from cell In[3]")
    expect(red).to_contain_text("got 20, expected 5")
    assert "Traceback" not in red.text_content() and not book.errors
    book.screenshot("predict_and_check")
    kept = json.loads((book.path.parent / ".progress/progress.json").read_text())
    assert kept["predictions"]["0.1 ridge"]["value"] == 20
