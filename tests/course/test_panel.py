from __future__ import annotations

import gc
import threading
import time
import weakref

import ipywidgets as w
import pytest
from ipywidgets.widgets.widget import _instances
from matplotlib.figure import Figure

from minillm.course import live
from minillm.course.live import claim
from minillm.course.panel import Job, Panel
from minillm.course.plots import bars

SECONDS = 30  # limit of every wait in these tests


@pytest.fixture(autouse=True)
def no_panel_outlives_its_test():
    before = set(_instances)
    yield
    for widget in list(live._open.values()):
        live.close_widget(widget)
    assert set(_instances) <= before, "widgets outlived the panel"


def draw(values, result):
    return bars({"n": values["n"]}, "rows"), f"n = {values['n']}, {'predicted' if result is None else f'measured {result}'}"


def panel(measure=lambda job, n: n * n, name="toy", draw=draw, **controls):
    return Panel(name, controls or {"n": w.IntSlider(2, 1, 512, description="rows")}, measure, draw)


def test_moving_a_control_changes_picture_and_verdict():
    p = panel()
    p.wait(SECONDS)
    first = p.picture.value
    assert bytes(first).startswith(b"\x89PNG") and p.verdict.value == "n = 2, measured 4"
    p["n"].value = 128
    p.wait(SECONDS)
    assert p.picture.value != first and p.verdict.value == "n = 128, measured 16384"
    p["n"].value = 2
    p.wait(SECONDS)
    assert p.picture.value == first


def test_the_prediction_is_shown_while_the_measurement_runs_and_the_kernel_is_free():
    go, running = threading.Event(), threading.Event()

    def measure(job, n):
        running.set()
        assert go.wait(SECONDS)
        return n

    p = panel(measure)
    assert running.wait(SECONDS)
    assert p.verdict.value == "n = 2, predicted" and p.picture.value and p.bar.layout.visibility == "visible"
    with pytest.raises(TimeoutError, match="toy: still measuring"):
        p.wait(0.01)
    go.set()
    p.wait(SECONDS)
    assert p.verdict.value == "n = 2, measured 2" and p.bar.layout.visibility == "hidden"


def test_the_newest_position_wins_and_older_measurements_stop_early():
    done, running = [], threading.Event()

    def measure(job, n):
        running.set()
        for i in range(1000 if n < 100 else 1):
            job.progress(i / 1000)
            time.sleep(0.01)
        done.append(n)
        return n

    p = panel(measure)
    assert running.wait(SECONDS)
    start = time.monotonic()
    for n in (3, 4, 5, 100):
        p["n"].value = n
    p.wait(SECONDS)
    assert done == [100] and p.verdict.value == "n = 100, measured 100"
    assert time.monotonic() - start < 8


def test_a_stubborn_older_measurement_is_not_shown():
    go, running, shown = threading.Event(), threading.Event(), []

    def measure(job, n):
        running.set()
        assert go.wait(SECONDS)  # never looks at job.cancelled
        return n

    p = panel(measure)
    p.verdict.observe(lambda change: shown.append(change["new"]), "value")
    assert running.wait(SECONDS)
    p["n"].value = 7
    go.set()
    p.wait(SECONDS)
    assert p.verdict.value == "n = 7, measured 7" and "n = 2, measured 2" not in shown


def test_a_position_that_comes_while_an_older_result_is_drawn_still_wins():
    drawing, go = threading.Event(), threading.Event()

    def slow_for_two(values, result):
        if result == 2:
            drawing.set()
            assert go.wait(SECONDS)
        return b"picture", f"n = {values['n']}, {result}"

    p = panel(lambda job, n: n, draw=slow_for_two)
    shown = []
    p.verdict.observe(lambda change: shown.append(change["new"]), "value")
    assert drawing.wait(SECONDS)
    p["n"].value = 7
    go.set()
    p.wait(SECONDS)
    assert p.verdict.value == "n = 7, 7" and "n = 2, 2" not in shown


def test_progress_is_shown_and_limited_in_rate():
    seen = []

    def measure(job, n):
        for i in range(200):
            job.progress(i / 200)
            time.sleep(0.001)
        return n

    p = panel(measure)
    p.bar.observe(lambda change: seen.append(change["new"]), "value")
    p.wait(SECONDS)
    assert 0 < len([s for s in seen if 0 < s < 1]) < 40


def test_a_failing_measurement_is_shown_and_raised_and_the_next_one_works():
    def measure(job, n):
        if n == 2:
            raise ValueError("<no> memory")
        return n

    p = panel(measure)
    with pytest.raises(ValueError, match="memory"):
        p.wait(SECONDS)
    assert "The measurement failed: ValueError: &lt;no&gt; memory" in p.verdict.value and p.bar.layout.visibility == "hidden"
    p["n"].value = 3
    p.wait(SECONDS)
    assert p.verdict.value == "n = 3, measured 3"


def test_two_panels_never_measure_at_once():
    active, most = [], []

    def measure(job, n):
        active.append(1)
        most.append(len(active))
        time.sleep(0.05)
        active.pop()
        return n

    panels = [panel(measure, name=f"toy {i}", draw=lambda values, result: (b"quick", "")) for i in range(3)]
    for p in panels:
        p.wait(SECONDS)
    assert max(most) == 1


def test_running_the_cell_again_leaves_no_widget_thread_or_figure_behind():
    figures = []

    def remember(values, result):
        fig, verdict = draw(values, result)
        figures.append(weakref.ref(fig))
        return fig, verdict

    first = panel(draw=remember)
    first.wait(SECONDS)
    count, threads = len(_instances), threading.active_count()
    for _ in range(5):
        p = panel(draw=remember)
        p.wait(SECONDS)
        p["n"].value = 9
        p.wait(SECONDS)
    assert len(_instances) == count and first.comm is None
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    gc.collect()
    assert isinstance(bars({"a": 1}, ""), Figure) and not [f for f in figures if f() is not None]


def test_a_closed_panel_stops_measuring_and_ignores_its_sliders():
    running, stopped = threading.Event(), threading.Event()

    def measure(job, n):
        running.set()
        while not job.cancelled:
            time.sleep(0.005)
        stopped.set()
        job.check()

    p = panel(measure)
    assert running.wait(SECONDS)
    slider, verdict = p["n"], p.verdict.value
    p.close()
    assert stopped.wait(SECONDS)
    slider.value = 50
    p.wait(SECONDS)
    assert p.verdict.value == verdict


def test_the_picture_is_replaced_and_never_emptied():
    p = panel()
    p.wait(SECONDS)
    seen = []
    p.picture.observe(lambda change: seen.append(len(change["new"])), "value")
    for n in (5, 6, 7):
        p["n"].value = n
        p.wait(SECONDS)
    assert seen and min(seen) > 500


def test_measurements_wait_for_the_end_of_a_drag():
    p = panel(n=w.IntSlider(2, 1, 9, continuous_update=True))
    p.wait(SECONDS)
    assert p["n"].continuous_update is False


def test_several_controls_arrive_by_name():
    p = panel(
        lambda job, n, dtype: f"{n} {dtype}",
        n=w.SelectionSlider(options=[1, 2, 4], value=4),
        dtype=w.Dropdown(options=["float32", "bfloat16"]),
    )
    p["dtype"].value = "bfloat16"
    p.wait(SECONDS)
    assert p.verdict.value == "n = 4, measured 4 bfloat16"


def test_without_a_front_end_the_still_picture_is_finished_and_holds_the_verdict():
    p = panel()
    bundle = p._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png"}
    assert p.verdict.value == "n = 2, measured 4"
    plain = panel(draw=lambda v, r: (bars({"n": v["n"]}, "rows"), ""))
    assert plain._repr_mimebundle_()["image/png"] != bundle["image/png"], "the verdict is written below the picture"


def test_with_a_front_end_the_live_view_comes_with_a_picture_for_readers(front_end):
    p = panel(lambda job, n: time.sleep(0.2) or n)
    bundle = p._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(bundle)
    assert bundle["text/plain"] == "toy: a live panel; run this cell in JupyterLab to move its controls"
    p.wait(SECONDS)


def test_any_widget_may_replace_another_of_its_name():
    first = claim("x", w.HBox([w.IntSlider(), w.HBox([w.Button()])]))
    claim("x", w.HTML())
    assert first.comm is None


def test_a_cancelled_job_stops_at_its_next_report():
    job = Job({}, lambda *_: None)
    job.check()
    job.cancel()
    with pytest.raises(Exception, match="^$"):
        job.progress(0.5)
