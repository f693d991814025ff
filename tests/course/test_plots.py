from __future__ import annotations

import io
import itertools
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from minillm.course.needles import Needles, change
from minillm.course.plots import Point, Roof, Span, bars, block_table, lines, png, roofline, si, timeline
from minillm.course.style import COLOURS
from minillm.perf import meter

HERE, CARD = Roof("this machine", 1e11, 2e10), Roof("H100 SXM", 9.894e14, 3.35e12)
POINTS = [
    Point(f"{m} rows", 2e6 * m, 4e6 + 8e3 * m, 3e-4 + 2e-5 * m, 2.5e-4 + 2e-5 * m, 4e-4 + 3e-5 * m) for m in (1, 8, 64, 512)
]
SERIES = {"recompute": [(8, 0.1, 0.09, 0.12), (16, 0.2, 0.19, 0.3)], "cache": [(8, 0.1), (16, 0.1)]}

FIGURES = {
    "roofline": lambda: roofline([HERE, CARD], POINTS, trail=True, title="t"),
    "roof only": lambda: roofline([HERE]),
    "timeline": lambda: timeline([Span(0, 0, 2, "prefill", "A"), Span(0, 2, 9, label="A"), Span(1, 0, 9, "padding", "waits")]),
    "blocks": lambda: block_table(10, {"A": [0, 1], "B": [0, 2]}, cached=[5], title="t"),
    "no tables": lambda: block_table(4, {}),
    "bars": lambda: bars({"plain": 0.4, "cache": 0.04, "none": 0.0}, "s", spread={"cache": (0.03, 0.06)}, baseline="plain"),
    "lines": lambda: lines(SERIES, "position", "s", logx=True, marks={"crossover": 12}),
    "log lines": lambda: lines({str(i): SERIES["cache"] for i in range(5)}, "position", "s", logy=True),
    "needles": lambda: Needles({"skip": {"tokens": 4}}, {"skip": {"tokens": 1}}).figure("t"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_equal_figures_give_equal_bytes_that_are_a_picture(name):
    one, two = png(FIGURES[name](), "a caption"), png(FIGURES[name](), "a caption")
    assert one == two and b"Software" not in one and b"date" not in one.lower()
    pixels = imread(io.BytesIO(one))
    assert pixels.shape[0] < 700 and pixels.shape[1] < 900 and pixels[..., :3].std() > 0.01


@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_shows_a_figure_that_ends_a_cell(name):
    assert FIGURES[name]()._repr_png_() == png(FIGURES[name]())


def test_no_figure_is_known_to_pyplot():
    for make in FIGURES.values():
        make()
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()


def test_no_text_is_cut_off_at_the_edge_of_the_picture():
    for name, make in FIGURES.items():
        pixels = imread(
            io.BytesIO(png(make(), "A caption that is long enough to need a second line, and that says what you can now say."))
        )
        edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])[:, :3]
        assert (edge > 0.95).all(), name


def test_neighbouring_colours_differ_in_grey():
    grey = [sum(f * int(c[i : i + 2], 16) for f, i in ((0.299, 1), (0.587, 3), (0.114, 5))) for c in COLOURS]
    assert min(abs(a - b) for a, b in itertools.pairwise(grey)) > 8


def test_a_roofs_ridge_and_a_points_place():
    assert HERE.ridge == 5 and round(CARD.ridge) == 295
    p = Point("x", 100, 50, 2)
    assert (p.intensity, p.rate) == (2, 50)


def test_a_points_label_states_its_share_of_the_roof():
    fig = roofline([HERE], [Point("decode", 1e9, 1e9, 0.1)])  # 1 FLOP/B: the roof is 2e10, reached 1e10
    assert "decode: 50% of roof" in [t.get_text() for t in fig.axes[0].texts]


def test_labels_do_not_cover_each_other():
    fig = roofline([HERE], [Point(f"operator {i}", 1e9, 1e9, 0.1 * (1 + i / 50)) for i in range(4)])
    boxes = [t.get_window_extent() for t in fig.axes[0].texts]
    assert len(boxes) == 5 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_label_does_not_touch_the_marker_of_another_point():
    points = [Point("the first of two", 1e9, 1e9 / 14.2, 1 / 20), Point("the second", 1e9, 1e9 / 23.3, 1 / 33)]
    fig = roofline([Roof("here", 201e9, 20.1e9)], points)
    (label,) = [t for t in fig.axes[0].texts if t.get_text().startswith("the first")]
    x, y = fig.axes[0].transData.transform((points[1].intensity, points[1].rate))
    assert not label.get_window_extent().padded(5).contains(x, y)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: roofline([]), "at least one roof"),
        (lambda: timeline([]), "at least one span"),
        (lambda: timeline([Span(0, 0, 1, "lunch")]), "unknown span kind 'lunch'"),
        (lambda: block_table(4, {"A": [4]}), "block 4 is outside the pool of 4"),
        (lambda: bars({}, "s"), "bars need values"),
        (lambda: bars({"a": 1}, "s", baseline="b"), "'b'"),
        (lambda: Needles({"hurry": {}}, {}), "unknown verb 'hurry'"),
        (lambda: Needles({}, {}), "nothing to show"),
    ],
)
def test_what_cannot_be_drawn_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (3.35e12, "3.35 TB/s"),
        (0.0371, "37.1 mB/s"),
        (999.9, "1 kB/s"),
        (0, "0 B/s"),
        (1, "1 B/s"),
        (1e-12, "0.001 nB/s"),
        (1e18, "1000 PB/s"),
    ],
)
def test_si_prefixes(x, text):
    assert si(x, "B/s") == text


BEFORE = {"skip": {"tokens computed": 36864, "tokens skipped": 0}, "move less": {"weight bytes": 14 * 10**9, "KV bytes": 0}}
AFTER = {"skip": {"tokens computed": 575, "tokens skipped": 36289}, "move less": {"weight bytes": 14 * 10**9, "KV bytes": 16}}


def test_the_needles_table_is_exact_and_aligned():
    assert str(Needles(BEFORE, AFTER, ("recompute", "cache"))) == "\n".join(
        [
            "                                 recompute           cache  change",
            "skip       tokens computed          36,864             575   ÷64.1",
            "           tokens skipped                0          36,289     new",
            "move less  weight bytes     14,000,000,000  14,000,000,000       =",
            "           KV bytes                      0              16     new",
        ]
    )


def test_snapshots_of_the_engines_meter_are_taken_as_they_are():
    plain, cached = (meter.Needles(tokens_computed=n, flops={"float32": 10 * n}, kv_live_bytes=64 - n) for n in (64, 4))
    n = Needles(plain, cached)
    assert ("skip", "tokens computed", 64, 4) in n.rows and ("compute less", "flops float32", 640, 40) in n.rows
    assert [v for v, *_ in n.rows] == [v for v, counters in plain.by_verb().items() for _ in counters]
    assert "kv live bytes" in str(n)


def test_needles_keep_the_order_of_the_verbs_and_show_a_missing_counter_as_zero():
    n = Needles({"break serial": {"passes": 64}}, {"skip": {"tokens": 1}})
    assert [row[:2] for row in n.rows] == [("skip", "tokens"), ("break serial", "passes")]
    assert "gone" in str(n) and "new" in str(n)


def test_the_figure_leaves_out_what_is_zero_on_both_sides_and_the_table_does_not():
    n = Needles({"skip": {"a": 0, "b": 2}}, {"skip": {"a": 0, "b": 3}})
    assert [t.get_text() for t in n.figure().axes[0].get_yticklabels()] == ["skip:  b"] and "a" in str(n)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(1, 1, "="), (0, 5, "new"), (5, 0, "gone"), (2, 3, "×1.5"), (3, 2, "÷1.5"), (1, 64000, "×64,000"), (0, 0, "=")],
)
def test_a_change_is_a_factor(before, after, text):
    assert change(before, after) == text
