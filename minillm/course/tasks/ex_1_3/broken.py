"""1.3 break: find what a full tier gives away: a block that is about to be read."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

from torch import Tensor

from minillm import SamplingParams
from minillm.cache.tiers import HostTier
from minillm.course.expect import Mismatch, expect_at_most, expect_equal
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_3.common import BLOCK, FIRST, NOBODY, SECOND, TINY, cold, data_of, generated, make_llm
from minillm.model.transformer import Transformer


def _items(*numbers: int) -> list[tuple[bytes, Tensor]]:
    return [(bytes([i]), data_of(i)) for i in numbers]


def _names(items: Any) -> list[int]:
    return [key[0] for key, _ in items]


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
    expect_equal(tier.read(b"\x01"), data_of(1), what="block 1")
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
    expect_equal(left[0][1], data_of(1), what="the bytes of block 1 as it was handed on")


def _tier_pending(kind: Any) -> None:
    tier = kind(30)
    tier.write(_items(1, 2, 3), NOBODY)
    left = tier.write(_items(4), frozenset({b"\x01"}))
    expect_equal(_names(left), [2], what="what left while block 1, the oldest, was about to be read")
    expect_equal(tier.read(b"\x01"), data_of(1), what="block 1")


def _tier_all_pending(kind: Any) -> None:
    tier = kind(20)
    tier.write(_items(1, 2), NOBODY)
    left = tier.write(_items(3), frozenset({b"\x01", b"\x02"}))
    expect_equal(_names(left), [3], what="what left when every block was about to be read")
    expect_equal([tier.has(bytes([i])) for i in (1, 2, 3)], [True, True, False], what="blocks 1, 2, 3 are there")


def _tier_too_large(kind: Any) -> None:
    tier = kind(20)
    tier.write(_items(1), NOBODY)
    left = tier.write([(b"\x09", data_of(9, 50))], NOBODY)
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
    llm = make_llm(model, host_cache=kind(3 * block))
    prompts = [FIRST, SECOND, FIRST, SECOND, FIRST]
    expect_equal(generated(llm, prompts), cold(prompts), what="tokens of two prompts in turn, over your tier of three blocks")
    llm = make_llm(model, host_cache=kind(3 * block))
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
