"""1.3 core: decide how many offered blocks to load, and recompute the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from minillm.course.expect import Mismatch, expect_at_most, expect_equal
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_1_3.common import BLOCK, FIRST, GREEDY, SECOND, cold, generated, make_llm
from minillm.perf.transfer import Link, LoadOffer, load_or_recompute


@dataclass(frozen=True)
class Offer:
    """What the engine offers, as plain fields; see the contract."""

    past: int
    rest: int
    tiers: tuple[str, ...]
    block_size: int
    block_bytes: int
    links: Mapping[str, Link]
    prefill: Callable[[int, int], float]


def _linear(past: int, new: int) -> float:
    """One second a token."""
    return float(new)


def _attention(past: int, new: int) -> float:
    """A second a token, and a hundredth for every key that it sees."""
    return new + sum(past + i for i in range(new)) / 100


Prefill = Callable[[int, int], float]


def _offer(tiers: Sequence[str], prefill: Prefill = _linear, past: int = 0, rest: int = 1, **links: Link) -> Offer:
    return Offer(past, rest, tuple(tiers), 4, 1024, links, prefill)


def _best(o: Offer) -> int:
    """By trying every number; the first of equals."""
    costs = []
    for n in range(len(o.tiers) + 1):
        held = o.tiers[:n]
        load = sum(o.links[t].seconds(held.count(t) * o.block_bytes) for t in sorted(set(held)))
        costs.append(load + o.prefill(o.past + 4 * n, 4 * (len(o.tiers) - n) + o.rest))
    return min(range(len(costs)), key=lambda n: (round(costs[n], 9), n))


def _core_shape(f: Any) -> None:
    for count in (1, 2, 5):
        got = f(_offer(["host"] * count, host=Link(512.0)))
        if isinstance(got, bool) or not isinstance(got, int) or not 0 <= got <= count:
            raise Mismatch(f"{count} blocks are offered: the answer is a whole number from 0 to {count}, got {got!r:.60}")


def _core_by_hand(f: Any) -> None:
    for speed, expected in ((512.0, 3), (128.0, 0)):
        what = f"three blocks, each {1024 / speed:g} s to load and 4 s to compute"
        expect_equal(f(_offer(["host"] * 3, host=Link(speed))), expected, what=what)


def _core_random(f: Any) -> None:
    draw = random.Random(13)
    for _ in range(60):
        tiers = [draw.choice(["host", "disk"]) for _ in range(draw.randrange(9))]
        links = {name: Link(2 ** draw.uniform(6, 12), draw.choice([0.0, draw.uniform(0, 30)])) for name in ("host", "disk")}
        o = _offer(tiers, draw.choice([_linear, _attention]), draw.randrange(60), draw.randrange(1, 40), **links)
        speeds = "; ".join(f"{t}: {1024 / link.bandwidth:.3g} s a block after {link.latency:.3g} s" for t, link in links.items())
        attends = " and 0.01 s a key" if o.prefill is _attention else ""
        where = f"[{', '.join(tiers)}] behind {o.past} tokens, {o.rest} more; {speeds}; 1 s a token{attends}"
        expect_equal(f(o), _best(o), what=where)


def _core_nothing(f: Any) -> None:
    expect_equal(f(_offer([], host=Link(512.0))), 0, what="nothing is offered")


def _core_latency(f: Any) -> None:
    slow_start = Link(1024.0, 5.0)
    for blocks, expected in ((1, 0), (2, 2), (6, 6)):
        expect_equal(f(_offer(["disk"] * blocks, disk=slow_start)), expected, what=f"{blocks} blocks at 1 s each after 5 s, once")


def _core_prefix(f: Any) -> None:
    o = _offer(["host", "host", "disk", "disk"], host=Link(1024.0), disk=Link(128.0))
    expect_equal(f(o), 2, what="two fast blocks, then two slow ones")
    o = _offer(["disk", "host", "host", "host"], host=Link(1024.0), disk=Link(128.0))
    expect_equal(f(o), 4, what="one slow block in front of three fast ones: 8 + 3 s against 16 s")


def _core_past(f: Any) -> None:
    link = Link(1024 / 4.5)  # 4.5 s a block
    expect_equal(f(_offer(["host"] * 2, _attention, past=0, host=link)), 0, what="4.5 s to load a block, early tokens")
    expect_equal(f(_offer(["host"] * 2, _attention, past=400, host=link)), 2, what="the same behind 400 tokens")


def _core_rest(f: Any) -> None:
    def at_least_eight(past: int, new: int) -> float:
        return max(8.0, float(new))

    o = _offer(["host"] * 2, at_least_eight, rest=8, host=Link(1024.0))
    expect_equal(f(o), 2, what="two blocks at 1 s each and 8 tokens more; a pass takes 1 s a token and 8 s at least")


def _core_tie(f: Any) -> None:
    expect_equal(f(_offer(["host"] * 3, host=Link(256.0))), 0, what="4 s to load a block and 4 s to compute it")


def _core_state(f: Any) -> None:
    links = {"host": Link(512.0)}
    o = Offer(0, 1, ("host",) * 3, 4, 1024, links, _linear)
    first = f(o)
    expect_equal(links, {"host": Link(512.0)}, what="links after the call")
    expect_equal(f(o), first, what="the same offer a second time")


def _core_engine(f: Any) -> None:
    expected = cold([FIRST, SECOND, FIRST])
    for speed, blocks in ((1e12, 3), (1.0, 0)):
        llm = make_llm(host_cache=10**6, tier_policy=f)
        tiers = llm.engine.cache.tiers
        assert tiers is not None and tiers.prefill is not None
        tiers.links["host"] = Link(speed)
        expect_equal(generated(llm, [FIRST, SECOND]), expected[:2], what="tokens of two prompts")
        tiers.links["host"] = Link(speed)  # what was measured since is another machine's business
        (out,) = llm.generate([FIRST], GREEDY)
        expect_equal(out.token_ids, expected[2], what="tokens of the first prompt again")
        expect_equal(out.num_loaded_tokens, blocks * BLOCK, what=f"tokens loaded over a link of {speed:g} bytes/s")


def _core_budget(f: Any) -> None:
    calls = []

    def prefill(past: int, new: int) -> float:
        calls.append((past, new))
        return float(new)

    f(_offer(["host"] * 40, prefill, host=Link(300.0)))
    expect_at_most(len(calls), 2 * 41, "predictions of prefill for 40 blocks")


CORE = Task(
    "1.3 core",
    "Load or recompute",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: three blocks by hand", _core_by_hand, hint=1),
        NamedCheck("random: against trying every number", _core_random, hint=1),
        NamedCheck("edges: nothing is offered", _core_nothing, hint=3),
        NamedCheck("edges: a slow start is paid once", _core_latency, hint=2),
        NamedCheck("edges: a prefix may be loaded in part", _core_prefix, hint=1),
        NamedCheck("edges: what is before the offer counts", _core_past, hint=2),
        NamedCheck("edges: what is behind the offer counts", _core_rest, hint=2),
        NamedCheck("edges: a tie is computed", _core_tie, hint=3),
        NamedCheck("state: the offer is not changed", _core_state),
        NamedCheck("engine: the same tokens, and your decision", _core_engine, hint=3),
        NamedCheck("budget: predictions", _core_budget, hint=3),
    ),
    (
        "Write down the whole time to the first token if n blocks are loaded: their loads, and the prefill of what is left.\n"
        "Then take the n for which it is least.",
        "A tier that holds c of the first n blocks costs links[tier].seconds(c * block_bytes), once.\n"
        "Left to compute: (len(tiers) - n) * block_size + rest tokens, behind past + n * block_size.",
        "def cost(n): held = offer.tiers[:n]; return sum(... for tier in set(held)) + offer.prefill(..., ...)\n"
        "return min(range(len(offer.tiers) + 1), key=cost)   # min gives the first of equals: the tie that loads least",
    ),
    seam=Seam("tier_policy", "load or recompute", lambda f: {"tier_policy": f}),
    references=(load_or_recompute, LoadOffer.load_seconds, LoadOffer.prefill_seconds),
)
