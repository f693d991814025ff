"""Lesson 1.2: a prefix cache recorded step by step, and its tree drawn from the snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm import LLM, SamplingParams
from minillm.cache.snapshot import CacheSnapshot, TreeNode
from minillm.course.style import DPI, FONT, INK, SMALL, SOFT, Drawing

COLUMNS = 5
"""Blocks that fit side by side."""


@dataclass(frozen=True)
class Frame:
    """The cache after one event: what happened, and the snapshot."""

    event: str
    shot: CacheSnapshot


def record(llm: LLM, prompts: Iterable[tuple[str, str]], max_tokens: int = 3) -> list[Frame]:
    """Send named prompts one after the other; a frame when each is computed and one when it has ended."""
    frames = [Frame("an empty pool", llm.engine.cache_snapshot())]
    for name, prompt in prompts:
        llm.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), name)
        outputs = llm.engine.step()
        found = next(o.num_cached_tokens for o in outputs if o.request_id == name)
        total = len(llm.engine.encode(prompt))
        said = f"{name} runs: {found} of {total} tokens found, {total - found} computed"
        frames.append(Frame(said, llm.engine.cache_snapshot()))
        while llm.engine.has_work:
            llm.engine.step()
        frames.append(Frame(f"{name} has ended: its full blocks stay", llm.engine.cache_snapshot()))
    return frames


def tree_figure(frames: Sequence[Frame], i: int, decode: Callable[[Sequence[int]], str]) -> tuple[Figure, str]:
    """Frame i: a strip is a node, a box one of its blocks with number and text. Thick: in use. Dotted: new here."""
    shot, before = frames[i].shot, frames[i - 1].shot if i else None
    old = {} if before is None or before.tree is None else _blocks(before.tree)
    now = {} if shot.tree is None else _blocks(shot.tree)
    gone = [b for b, tokens in old.items() if now.get(b) != tokens]
    strips = _layout(shot.tree)
    rows = max([4, *(strip.row + 1 for strip in strips)])
    fig = Drawing(figsize=(7.7, 0.9 + 0.52 * rows), dpi=DPI, facecolor="white")
    ax = fig.add_axes((0.01, 0.02, 0.98, 0.96))
    ax.axis("off")
    ax.set_xlim(-0.1, COLUMNS)
    ax.set_ylim(rows + 0.1, -0.75)
    counts = f"{len(shot.free)} free, {len(shot.referenced)} in use, {len(shot.cached)} cached, of {shot.num_blocks} blocks"
    ax.text(0, -0.45, counts, fontsize=FONT, color=INK)
    for strip in strips:
        node, column, here = strip.node, strip.column, strip.row
        if strip.parent_row is not None and strip.parent_row != here:
            left, top, middle = column - 0.05, strip.parent_row + 0.8, here + 0.43
            ax.plot([left, left, column], [top, middle, middle], color=SOFT, linewidth=1)
        size = len(node.tokens) // len(node.blocks)
        for j, block in enumerate(node.blocks):
            fresh = old.get(block) != now[block]
            look: dict[str, Any] = {"facecolor": "#DDEBF5" if not fresh else "#FBE3D3", "hatch": "" if not fresh else "...."}
            ax.add_patch(Rectangle((column + j, here + 0.06), 0.97, 0.74, edgecolor="white", linewidth=0, **look))
            text = " ".join(decode(node.tokens[j * size : (j + 1) * size]).split())
            ax.text(column + j + 0.04, here + 0.24, str(block), fontsize=SMALL - 2, color=SOFT, va="center")
            ax.text(column + j + 0.04, here + 0.55, text[:22], fontsize=SMALL - 1.5, color=INK, va="center")
        frame: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.0} if node.locked else {"edgecolor": SOFT, "linewidth": 0.7}
        ax.add_patch(Rectangle((column, here + 0.06), len(node.blocks) - 0.03, 0.74, fill=False, **frame))
    lost = f" Evicted: {len(gone)} block{'s' if len(gone) > 1 else ''} ({', '.join(map(str, gone))})." if gone else ""
    return fig, f"{frames[i].event}.{lost}"


@dataclass(frozen=True)
class _Strip:
    """Where a node is drawn: the column of its first block, its row, and the row of its parent (None below the root)."""

    node: TreeNode
    column: int
    row: int
    parent_row: int | None


def _layout(tree: TreeNode | None) -> list[_Strip]:
    """A first child continues its parent's row; every other one begins a row below."""
    strips: list[_Strip] = []
    rows = 0
    waiting: list[tuple[TreeNode, int, int | None, bool]] = [(c, 0, None, False) for c in reversed(tree.children if tree else ())]
    while waiting:
        node, column, parent_row, first = waiting.pop()
        row = parent_row if first and parent_row is not None else rows
        rows = max(rows, row + 1)
        strips.append(_Strip(node, column, row, parent_row))
        following = [(child, column + len(node.blocks), row, i == 0) for i, child in enumerate(node.children)]
        waiting.extend(reversed(following))
    return strips


def _blocks(tree: TreeNode) -> dict[int, tuple[int, ...]]:
    found = {}
    for node in tree.walk():
        size = len(node.tokens) // max(len(node.blocks), 1)
        found.update({b: node.tokens[i * size : (i + 1) * size] for i, b in enumerate(node.blocks)})
    return found
