"""Lesson 3.1: what attention moves with and without the matrix of scores, the tiles, a compiled kernel, and the live panel."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle
from torch import Tensor

from minillm import kernels
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.plots import Point, Roof, lines, roofline
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, SMALL, SOFT, Drawing, titled
from minillm.perf.hardware import Hardware
from minillm.perf.timing import Timing, compare
from minillm.perf.units import format_bytes, format_time
from minillm.perf.work import Work, visible_pairs

HEADS = 9
LENGTHS = (128, 256, 512, 1024, 2048)
TILES = (16, 32, 64, 128, 256)
WAYS = {"matrix": "the n × n matrix", "tiles": "tiles"}
RECORDED = Path(__file__).with_name("flash_kernel.json")
"""What `minillm kernels` said of the prefill kernel, for platforms without Triton."""


# Counts, derived from shapes alone --------------------------------------------------------------------------------------------


def matrix_work(new: int, total: int, head_dim: int, heads: int = HEADS, element: int = 4) -> Work:
    """Attention with its scores in memory: scores written, read by the softmax, weights written, read by the second product.

    All of the new × total pairs are computed and then masked; scale and mask ride on the softmax. K and V are read once a head.
    """
    pairs, rows = heads * new * total, heads * (2 * new + 2 * total) * head_dim
    return Work({_name(element): 4 * pairs * head_dim}, activation_bytes=(4 * pairs + rows) * element, launches=3)


def tiled_work(new: int, total: int, head_dim: int, tile: int, heads: int = HEADS, element: int = 4) -> Work:
    """The same in tiles: Q read and the result written once, K and V read up to its last query's key by each tile of queries.

    Only pairs that the mask admits are counted as arithmetic."""
    keys = sum(total - new + min(first + tile, new) for first in range(0, new, tile))
    rows = heads * (2 * new + 2 * keys) * head_dim
    flops = 4 * heads * visible_pairs(new, total) * head_dim
    return Work({_name(element): flops}, activation_bytes=rows * element, launches=1)


def _name(element: int) -> str:
    return "float32" if element == 4 else "bfloat16"


def traffic_factor(new: int, total: int, head_dim: int, tile: int = 128, element: int = 2) -> float:
    """How many times as many bytes the matrix moves."""
    matrix = matrix_work(new, total, head_dim, element=element)
    return matrix.total_bytes / tiled_work(new, total, head_dim, tile, element=element).total_bytes


def score_bytes(n: int, element: int = 4) -> int:
    """Bytes of one matrix of scores for every head."""
    return HEADS * n * n * element


def merge_bytes(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Bytes of the parts of split keys in one layer: a result and a logsum of every part, in float32, written and read again."""
    return 2 * 4 * rows * heads * splits * (head_dim + 1) if splits > 1 else 0


def traffic_figure(head_dim: int = 64, tiles: Sequence[int] = (32, 128)) -> Figure:
    """Bytes of one head against n: with the matrix, in tiles, and what any way must move."""
    lengths = [2**i for i in range(6, 15)]
    series = {"the n × n matrix": [(n, matrix_work(n, n, head_dim, 1, 2).total_bytes) for n in lengths]}
    for tile in tiles:
        series[f"tiles of {tile}"] = [(n, tiled_work(n, n, head_dim, tile, 1, 2).total_bytes) for n in lengths]
    series["Q, K, V and the result"] = [(n, 4 * n * head_dim * 2) for n in lengths]
    return lines(series, "tokens n", "bytes of one head, 16 bits", logx=True, logy=True)


def tile_grid(n: int = 8, tile: int = 2) -> Figure:
    """Queries down, keys across: tiles that are seen whole, those that the diagonal cuts, and those that are never visited."""
    check_whole("n", n)
    check_whole("tile", tile)
    looks: dict[str, dict[str, Any]] = {
        "computed and used": {"facecolor": COLOURS[0]},
        "computed, then masked": {"facecolor": COLOURS[0], "alpha": 0.35, "hatch": "////"},
        "never computed": {"facecolor": "white"},
    }
    used, masked, never = looks.values()
    side = tile * 0.96
    edge: dict[str, Any] = {"edgecolor": SOFT, "linewidth": 0.6}
    fig = Drawing(figsize=(5.4, 4.6), dpi=DPI, layout="constrained", facecolor="white")
    ax = fig.subplots()
    for row in range(0, n, tile):
        for column in range(0, n, tile):
            look = used if column < row else masked if column == row else never
            ax.add_patch(Rectangle((column, row), side, side, **edge, **look))
        ax.add_patch(Polygon([(row, row), (row, row + side), (row + side, row + side)], **edge, **used))
    ax.set_xlim(-0.01 * n, n)
    ax.set_ylim(n, -0.01 * n)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    titled(ax, None, f"keys, in tiles of {tile}", f"queries, in tiles of {tile}")
    handles = [Patch(edgecolor=SOFT, label=label, **look) for label, look in looks.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL, frameon=False)
    return fig


def programs(rows: int, kv_heads: int, splits: int = 1) -> int:
    """Programs that a decode step starts in one layer: each has one row's keys of one KV head, or a part of them."""
    return rows * kv_heads * splits


# The compiled kernel ----------------------------------------------------------------------------------------------------------


def inspect_kernel(target: str = "sm_90") -> tuple[list[dict[str, Any]], str]:
    """What the compiler makes of the prefill kernel for a GPU that need not be here, and where the answer comes from.

    Compiled in a process of its own, because in a notebook kernels may be interpreted. Without Triton: what was recorded."""
    if kernels.missing():
        found = json.loads(RECORDED.read_text())
        return found["kernels"], f"recorded with triton {found['triton']}, since {kernels.missing()}"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "minillm.cli", "kernels", "--target", target, "--kernel", "flash_prefill"]
        subprocess.run([*command, "--json", str(file)], env=environment, check=True, capture_output=True, timeout=300)
        found = json.loads(file.read_text())
    return found["kernels"], f"compiled here, by triton {found['triton']}"


def describe_kernel(entries: list[dict[str, Any]]) -> str:
    """One line per case."""
    return "\n".join(
        f"{e['case']:14} {e['warps']} warps  {e['registers']:3} registers a thread, {e['spills']} spilled  "
        f"{e['shared'] / 1024:5.0f} KiB shared  {e['tensor_cores']}  {e['occupancy']:.1%} of the warps resident"
        for e in entries
    )


# The measurement --------------------------------------------------------------------------------------------------------------


def with_matrix(heads: int, n: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention [heads, n, dim] in float32 as a good unfused version has it: two products and torch's own softmax.

    The mask and the room for scores and weights are made once: what the system takes to hand out fresh memory is not
    attention's, and would be most of the difference."""
    mask = torch.full((n, n), -math.inf).triu(1)
    scores, weights = torch.empty(2, heads, n, n).unbind()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.baddbmm(mask, q, k.transpose(-1, -2), alpha=q.shape[-1] ** -0.5, out=scores)
        torch.softmax(scores, -1, out=weights)
        return weights @ v

    return attend


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own tiled attention."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


@dataclass(frozen=True)
class Both:
    """Times of one call, by way."""

    times: Mapping[str, Timing]

    @property
    def factor(self) -> float:
        return self.times["matrix"].median / self.times["tiles"].median


def measure(n: int, head_dim: int = 64, rounds: int = 5, tick: Callable[[], None] = lambda: None) -> Both:
    """Both ways over a prompt of n tokens, in float32, in turns. Their results are compared before they are timed."""
    check_whole("n", n)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, HEADS, n, head_dim, generator=generator).unbind()

    def ticking(call: Callable[[], Any]) -> Any:
        tick()
        return call()

    with torch.inference_mode():
        calls = {"matrix": partial(with_matrix(HEADS, n), q, k, v), "tiles": partial(fused, q, k, v)}
        torch.testing.assert_close(calls["matrix"](), calls["tiles"](), rtol=1e-4, atol=1e-4)
        found = compare({name: partial(ticking, call) for name, call in calls.items()}, rounds)
    return Both(found.timings)


def explain_factor(measured: float, by_bytes: float, by_flops: float) -> str:
    """Where a measured factor lies beside the two counted ones, and what that means."""
    low, high = sorted((by_bytes, by_flops))
    if measured > 1.1 * high:
        where = "more than either count: neither holds the exponentials, or how well each product runs"
    elif measured < low / 1.1:
        where = "less than either count: part of the time is the same in both"
    else:
        where = "within what the two counts allow: the bytes cost full price only where they leave the cache"
    return f"{measured:.1f} times as long, {where}"


def explain(n: int, head_dim: int, tile: int, found: Both | None) -> str:
    """The verdict: bytes and intensity of both ways, and what was measured."""
    matrix, tiles = matrix_work(n, n, head_dim), tiled_work(n, n, head_dim, tile)
    said = [f"n = {n}, head_dim {head_dim}, tiles of {tile}:"]
    for name, work in (("the matrix", matrix), ("tiles", tiles)):
        said.append(f"{name} {format_bytes(work.total_bytes)}, {work.total_flops / work.total_bytes:.1f} FLOP per byte;")
    said.append(f"<b>{short(matrix.total_bytes / tiles.total_bytes)} times the bytes</b>;")
    if found is None:
        said.append("measuring …")
    else:
        times = ", ".join(f"{WAYS[way]} {format_time(found.times[way].median)}" for way in WAYS)
        said.append(f"measured {times}: <b>{short(found.factor)} times as long</b>.")
    return f"<span class='verdict'>{' '.join(said)}</span>"


def attention_panel(hardware: Hardware, n: int = 512) -> Panel:
    """Sliders for n, head_dim and tile. The measurement is torch's own tiled attention, whose tile torch chooses: the slider's
    tile moves the counts alone."""
    kept: dict[tuple[int, int], Both] = {}

    def run(job: Any, n: int, head_dim: int, tile: int) -> Both:
        job.progress(0.0)
        return kept.get((n, head_dim)) or measure(n, head_dim, tick=job.check)

    def draw(values: dict[str, Any], found: Both | None) -> tuple[Figure, str]:
        n, head_dim, tile = values["n"], values["head_dim"], values["tile"]
        if found is not None:
            kept[n, head_dim] = found
        roof = Roof(f"{hardware.name}, float32", hardware.rate("float32"), hardware.bandwidth)
        works = {"matrix": matrix_work(n, n, head_dim), "tiles": tiled_work(n, n, head_dim, tile)}
        points = []
        for way, timing in (found.times if found else {}).items():
            points.append(
                Point(WAYS[way], works[way].total_flops, works[way].total_bytes, timing.median, timing.p10, timing.p90)
            )
        return roofline([roof], points), explain(n, head_dim, tile, found)

    controls = {
        "n": w.SelectionSlider(options=LENGTHS, value=n, description="n"),
        "head_dim": w.SelectionSlider(options=(64, 128), value=64, description="head_dim"),
        "tile": w.SelectionSlider(options=TILES, value=64, description="tile"),
    }
    return Panel("attention with the matrix and in tiles", controls, run, draw)
