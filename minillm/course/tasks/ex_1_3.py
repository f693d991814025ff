"""Exercise 1.3: load or recompute, a tier that gives away what is about to be read, and a load that is all or nothing."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.cache.tiered import Found, TieredCache
from minillm.cache.tiers import HostTier
from minillm.course.expect import Mismatch, expect_at_most, expect_equal
from minillm.course.task import NamedCheck, Seam, Task
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.transfer import Link, LoadOffer, load_or_recompute

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
BLOCK = 4
FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


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


def _llm(model: Transformer | None = None, **options: Any) -> LLM:
    """A pool of four blocks, which one of the prompts and its answer fill."""
    options = {"prefix_cache": "radix", "tier_policy": "always", "num_blocks": 4, "max_num_seqs": 1, **options}
    return LLM(model or Transformer.random(TINY), dtype="float32", block_size=BLOCK, **options)


def _tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [llm.generate([list(p)], GREEDY)[0].token_ids for p in prompts]


def _cold(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return _tokens(_llm(prefix_cache="none"), prompts)


# 1.3 core: load or recompute ------------------------------------------------------------------------------------------------


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
    expected = _cold([FIRST, SECOND, FIRST])
    for speed, blocks in ((1e12, 3), (1.0, 0)):
        llm = _llm(host_cache=10**6, tier_policy=f)
        tiers = llm.engine.cache.tiers
        assert tiers is not None and tiers.prefill is not None
        tiers.links["host"] = Link(speed)
        expect_equal(_tokens(llm, [FIRST, SECOND]), expected[:2], what="tokens of two prompts")
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


# 1.3 break: a host tier -----------------------------------------------------------------------------------------------------


def _data(i: int, size: int = 10) -> Tensor:
    return torch.full((size,), i, dtype=torch.uint8)


def _items(*numbers: int) -> list[tuple[bytes, Tensor]]:
    return [(bytes([i]), _data(i)) for i in numbers]


def _names(items: Any) -> list[int]:
    return [key[0] for key, _ in items]


NOBODY: frozenset[bytes] = frozenset()


def _tier_shape(kind: Any) -> None:
    tier = kind(100)
    left = tier.write(_items(1), NOBODY)
    if not isinstance(left, list):
        raise Mismatch(f"write gives the list of what left, got {left!r:.60}")
    expect_equal(tier.read(b"\x63"), None, what="read of a key that was never written")
    expect_equal((tier.has(b"\x01"), tier.has(b"\x02")), (True, False), what="has, of a key that is there and one that is not")
    expect_equal((tier.use(b"\x01"), tier.use(b"\x02")), (True, False), what="use, of a key that is there and one that is not")


def _tier_by_hand(kind: Any) -> None:
    tier = kind(20)
    expect_equal(_names(tier.write(_items(1, 2), NOBODY)), [], what="what left when two blocks of 10 bytes came into 20")
    expect_equal(tier.read(b"\x01"), _data(1), what="block 1")
    expect_equal(tier.used, 20, what="used")


def _tier_random(kind: Any) -> None:
    draw, limit = random.Random(5), 4
    tier, model = kind(10 * limit), OrderedDict[int, None]()
    for turn in range(200):
        i = draw.randrange(8)
        if draw.random() < 0.5:
            expect_equal(tier.use(bytes([i])), i in model, what=f"use of block {i} in turn {turn}")
        else:
            expected = []
            if i not in model and len(model) == limit:
                expected = [model.popitem(last=False)[0]]
            expect_equal(_names(tier.write(_items(i), NOBODY)), expected, what=f"what left when block {i} came in turn {turn}")
            model[i] = None
        if i in model:
            model.move_to_end(i)
        expect_equal([n for n in range(8) if tier.has(bytes([n]))], sorted(model), what=f"blocks there after turn {turn}")


def _tier_hands_down(kind: Any) -> None:
    tier = kind(20)
    tier.write(_items(1, 2), NOBODY)
    left = tier.write(_items(3, 4), NOBODY)
    expect_equal(_names(left), [1, 2], what="what left, oldest first")
    expect_equal(left[0][1], _data(1), what="the bytes of block 1 as it was handed on")


def _tier_pending(kind: Any) -> None:
    tier = kind(30)
    tier.write(_items(1, 2, 3), NOBODY)
    left = tier.write(_items(4), frozenset({b"\x01"}))
    expect_equal(_names(left), [2], what="what left while block 1, the oldest, was about to be read")
    expect_equal(tier.read(b"\x01"), _data(1), what="block 1")


def _tier_all_pending(kind: Any) -> None:
    tier = kind(20)
    tier.write(_items(1, 2), NOBODY)
    left = tier.write(_items(3), frozenset({b"\x01", b"\x02"}))
    expect_equal(_names(left), [3], what="what left when every block was about to be read")
    expect_equal([tier.has(bytes([i])) for i in (1, 2, 3)], [True, True, False], what="blocks 1, 2, 3 are there")


def _tier_too_large(kind: Any) -> None:
    tier = kind(20)
    tier.write(_items(1), NOBODY)
    left = tier.write([(b"\x09", _data(9, 50))], NOBODY)
    held = [i for i in (1, 9) if tier.has(bytes([i]))]
    expect_equal(sorted([*_names(left), *held]), [1, 9], what="blocks that are here or were handed on, none lost")
    expect_at_most(tier.used, 20, "bytes used")
    expect_equal(tier.has(b"\x09"), False, what="a block of 50 bytes is in a tier of 20")


def _tier_state(kind: Any) -> None:
    draw, tier = random.Random(7), kind(45)
    items = _items(*range(12))
    for _ in range(100):
        some, pinned = draw.sample(items, 3), frozenset(key for key, _ in draw.sample(items, 2))
        before = {key for key, _ in items if tier.has(key)}
        left = tier.write(some, pinned)
        after = {key for key, _ in items if tier.has(key)}
        handed = {key for key, _ in left}
        lost = (before | {key for key, _ in some}) - after - handed
        expect_equal(sorted(lost), [], what="blocks that are neither here nor handed on")
        expect_equal(sorted(before & pinned - after), [], what="pending blocks that left")
        expect_equal(tier.used, 10 * len(after), what="used")
        expect_at_most(tier.used, 45, "bytes used")


def _tier_engine(kind: Any) -> None:
    model = Transformer.random(TINY)
    block = int(TINY.kv_bytes_per_token(4)) * BLOCK
    llm = _llm(model, host_cache=kind(3 * block))
    prompts = [FIRST, SECOND, FIRST, SECOND, FIRST]
    expect_equal(_tokens(llm, prompts), _cold(prompts), what="tokens of two prompts in turn, over your tier of three blocks")
    llm = _llm(model, host_cache=kind(3 * block))
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    outs = [llm.generate([p], one)[0] for p in (FIRST, SECOND, FIRST)]
    expect_equal(outs[-1].num_loaded_tokens, 12, what="tokens loaded when making room for them fills the tier")


BREAK = Task(
    "1.3 break",
    "Find what a full tier gives away",
    (
        NamedCheck("shape", _tier_shape, hint=2),
        NamedCheck("exact: two blocks by hand", _tier_by_hand, hint=2),
        NamedCheck("random: least recently used, against a model", _tier_random, hint=2),
        NamedCheck("edges: what leaves is handed on, oldest first", _tier_hands_down, hint=2),
        NamedCheck("edges: a block that is about to be read stays", _tier_pending, hint=1),
        NamedCheck("edges: all blocks are about to be read", _tier_all_pending, hint=3),
        NamedCheck("edges: a block larger than the tier", _tier_too_large, hint=3),
        NamedCheck("state: nothing is lost, nothing is over the limit", _tier_state, hint=3),
        NamedCheck("engine: as the host tier, the same tokens", _tier_engine, hint=1),
    ),
    (
        "A hit is in this tier. To load it the pool makes room, and what the pool evicts is written into this tier, which is\n"
        "full. Which block does it push out?",
        "pending is the set of keys that are about to be read. The victim is the oldest key that is not in it.",
        "victim = next((k for k in self.items if k not in pending), None)\n"
        "If there is none, the new block finds no room: it goes on, into `left`, like one that is larger than the tier.",
    ),
    references=(HostTier,),
)


# 1.3 stretch: all or nothing ------------------------------------------------------------------------------------------------


@dataclass
class Shelf:
    """A tier that notes what is asked of it. lies: keys that it has and cannot read."""

    content: dict[bytes, Tensor]
    lies: frozenset[bytes] = NOBODY
    reads: list[bytes] = field(default_factory=list)

    def has(self, key: bytes) -> bool:
        return key in self.content or key in self.lies

    def read(self, key: bytes) -> Tensor | None:
        self.reads.append(key)
        return None if key in self.lies else self.content.get(key)


class Pool:
    """Where blocks are put; breaks when told to."""

    def __init__(self, breaks: bool = False) -> None:
        self.blocks: dict[int, Tensor] = {}
        self.calls = 0
        self.breaks = breaks

    def put(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        self.calls += 1
        if len(blocks) != len(contents):
            raise Mismatch(f"put takes as many contents as blocks, got {len(contents)} for {len(blocks)}")
        if self.breaks:
            raise RuntimeError("the copy failed")
        self.blocks.update(zip(blocks, contents))


def _keys(n: int) -> list[bytes]:
    return [bytes([i]) for i in range(n)]


def _shelf(n: int) -> Shelf:
    return Shelf({key: _data(key[0]) for key in _keys(n)})


def _load_shape(f: Any) -> None:
    pool = Pool()
    got = f(_keys(2), [5, 3], [_shelf(2)], pool.put)
    if isinstance(got, bool) or not isinstance(got, int):
        raise Mismatch(f"load gives the number of blocks, got {got!r:.60}")


def _load_by_hand(f: Any) -> None:
    pool = Pool()
    expect_equal(f(_keys(2), [5, 3], [_shelf(2)], pool.put), 2, what="two blocks that are there")
    expect_equal(pool.blocks, {5: _data(0), 3: _data(1)}, what="content of the pool's blocks")


def _load_random(f: Any) -> None:
    draw = random.Random(3)
    for _ in range(80):
        n = draw.randrange(1, 7)
        keys, blocks = _keys(n), draw.sample(range(20), n)
        shelves = [Shelf({k: _data(k[0]) for k in keys if draw.random() < 0.7}) for _ in range(2)]
        there = [any(shelf.has(key) for shelf in shelves) for key in keys]
        pool = Pool()
        expected = n if all(there) else there.index(False)
        expect_equal(f(list(keys), list(blocks), shelves, pool.put), expected, what=f"blocks there: {there}")
        whole = {b: _data(k[0]) for k, b in zip(keys, blocks)} if all(there) else {}
        expect_equal(pool.blocks, whole, what=f"what is in the pool; blocks there: {there}")


def _load_none(f: Any) -> None:
    expect_equal(f([], [], [Shelf({})], Pool().put), 0, what="no blocks")


def _load_lies(f: Any) -> None:
    keys = _keys(3)
    first = Shelf({keys[0]: _data(0), keys[2]: _data(2)}, lies=frozenset({keys[1]}))
    second = Shelf({key: _data(key[0]) for key in keys})
    pool = Pool()
    expect_equal(f(_keys(3), [1, 2, 3], [first, second], pool.put), 3, what="block 1 is damaged in the first tier only")
    expect_equal(pool.blocks, {1: _data(0), 2: _data(1), 3: _data(2)}, what="content of the pool's blocks")
    pool = Pool()
    expect_equal(f(_keys(3), [1, 2, 3], [first], pool.put), 1, what="block 1 is damaged in the only tier")
    expect_equal(pool.calls, 0, what="calls of put")


def _load_breaks(f: Any) -> None:
    pool = Pool(breaks=True)
    expect_equal(f(_keys(2), [1, 2], [_shelf(2)], pool.put), 0, what="put raises: blocks filled")


def _load_order(f: Any) -> None:
    tier = HostTier(30)
    tier.write([(key, _data(key[0])) for key in _keys(3)], NOBODY)
    f(_keys(3), [1, 2, 3], [tier], Pool().put)
    (left, *_) = tier.write([(b"\x09", _data(9))], NOBODY)
    expect_equal(left[0][0], 2, what="the block that leaves next; the tail of a prefix is of no use without its head")


def _load_state(f: Any) -> None:
    keys, blocks = _keys(3), [4, 5, 6]
    f(keys, blocks, [Shelf({key: _data(key[0]) for key in keys})], Pool().put)
    expect_equal((keys, blocks), (_keys(3), [4, 5, 6]), what="keys and blocks after the call")


def _load_engine(f: Any) -> None:
    for damage in (None, 1):
        llm = _llm(host_cache=10**6)
        tiers = llm.engine.cache.tiers
        assert tiers is not None
        loads: list[int] = []

        def load(found: Found, blocks: Sequence[int], tiers: TieredCache = tiers, loads: list[int] = loads) -> int:
            loads.append(f(list(found.keys), list(blocks), list(tiers.tiers), tiers.io.put))
            return loads[-1]

        tiers.load = load  # type: ignore[method-assign]
        expect_equal(_tokens(llm, [FIRST, SECOND]), _cold([FIRST, SECOND]), what="tokens of two prompts")
        if damage is not None:
            found = tiers.find(FIRST, 0, 3)
            _damage(tiers.tiers[0], found.keys[damage])
        (out,) = llm.generate([FIRST], GREEDY)
        expect_equal(out.token_ids, _cold([FIRST])[0], what="tokens of the first prompt again")
        expect_equal(out.num_loaded_tokens, BLOCK * (3 if damage is None else damage), what="tokens loaded")


def _damage(tier: Any, bad: bytes) -> None:
    read = tier.read
    tier.read = lambda key: None if key == bad else read(key)


def _load_budget(f: Any) -> None:
    keys = _keys(8)
    shelves = [Shelf({key: _data(key[0]) for key in keys[4:]}), Shelf({key: _data(key[0]) for key in keys})]
    pool = Pool()
    f(keys, list(range(8)), shelves, pool.put)
    expect_at_most(pool.calls, 1, "calls of put for eight blocks")
    expect_at_most(len(shelves[0].reads) + len(shelves[1].reads), 8, "reads of eight blocks, four in each tier")


STRETCH = Task(
    "1.3 stretch",
    "Load all or nothing",
    (
        NamedCheck("shape", _load_shape, hint=2),
        NamedCheck("exact: two blocks by hand", _load_by_hand, hint=2),
        NamedCheck("random: two tiers with holes", _load_random, hint=1),
        NamedCheck("edges: no blocks", _load_none, hint=3),
        NamedCheck("edges: a damaged block, and a second copy", _load_lies, hint=2),
        NamedCheck("edges: put fails", _load_breaks, hint=3),
        NamedCheck("state: the head is used last", _load_order, hint=1),
        NamedCheck("state: inputs unchanged", _load_state),
        NamedCheck("engine: damaged and whole", _load_engine, hint=1),
        NamedCheck("budget: one put, one read a block", _load_budget, hint=3),
    ),
    (
        "Read everything before anything is put. What was read last is what the tier lets go last, so read the tail first.",
        "A block comes from the first tier that has it and gives it: has may say True where read says None.\n"
        "The answer is len(keys), or the index of the first key that no tier gives.",
        "contents = [None] * len(keys); for i in reversed(range(len(keys))): for tier in tiers: contents[i] = …\n"
        "if any is None: return its index (the first). try: put(blocks, contents) except Exception: return 0",
    ),
    references=(TieredCache,),
)

TASKS = (CORE, BREAK, STRETCH)
