"""A tier returns the bytes it was given or nothing, stays within its size, and lets the oldest go first."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.tiers import MAGIC, SUFFIX, DiskTier, HostTier, chain_keys

OVERHEAD = len(MAGIC) + 32 + 32


def key(i: int) -> bytes:
    return hashlib.sha256(bytes([i])).digest()


def data(i: int, size: int = 10) -> torch.Tensor:
    return torch.full((size,), i, dtype=torch.uint8)


# --- keys ---


def test_a_key_names_the_whole_prefix():
    a, b = chain_keys(b"r", [1, 2, 3, 4, 5], 2), chain_keys(b"r", [1, 2, 3, 4], 2)
    assert a == b and len(a) == 2, "only full blocks have one"
    assert chain_keys(b"r", [9, 2, 3, 4], 2)[1] != a[1], "the same block after another beginning"
    assert chain_keys(b"s", [1, 2], 2) != a[:1], "another model"
    assert chain_keys(b"r", [1, 2], 1)[1] != a[0] and chain_keys(b"r", [1], 2) == []


# --- both tiers against a model ---

SIZES = st.sampled_from([1, 5, 10])


class Model:
    """An OrderedDict of what must be there, oldest first."""

    def __init__(self, limit, overhead):
        self.limit, self.overhead, self.items = limit, overhead, OrderedDict()

    def used(self):
        return sum(d.nbytes + self.overhead for d in self.items.values())

    def write(self, items, pending):
        left = []
        for k, d in items:
            if k in self.items:
                self.items.move_to_end(k)
                continue
            old = [o for o in self.items if o not in pending]
            room = self.limit - self.used() + sum(self.items[o].nbytes + self.overhead for o in old)
            if room < d.nbytes + self.overhead:
                left.append((k, d))
                continue
            while self.used() + d.nbytes + self.overhead > self.limit:
                left.append((old[0], self.items.pop(old[0])))
                old.pop(0)
            self.items[k] = d
        return left


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.sets(st.integers(0, 9), max_size=3)),
        st.tuples(st.just("read"), st.integers(0, 9), st.none()),
        st.tuples(st.just("use"), st.integers(0, 9), st.none()),
    ),
    max_size=25,
)


def run_against_model(tier, model, ops, returns):
    size = {i: (1, 5, 10)[i % 3] for i in range(10)}
    for what, arg, pending in ops:
        if what == "write":
            items = [(key(i), data(i, size[i])) for i in arg]
            left, expected = tier.write(items, {key(i) for i in pending}), model.write(items, {key(i) for i in pending})
            if returns:
                assert [k for k, _ in left] == [k for k, _ in expected]
                assert all(any(torch.equal(d, data(i, size[i])) for i in range(10) if key(i) == k) for k, d in left)
            else:
                assert left == []
        elif what == "use":
            assert tier.use(key(arg)) == (key(arg) in model.items)
            if key(arg) in model.items:
                model.items.move_to_end(key(arg))
        else:
            got = tier.read(key(arg))
            assert (got is None) == (key(arg) not in model.items)
            if got is not None:
                assert torch.equal(got, data(arg, size[arg]))
                model.items.move_to_end(key(arg))
        assert model.used() <= model.limit
        assert [tier.has(key(i)) for i in range(10)] == [key(i) in model.items for i in range(10)]


@settings(max_examples=150)
@given(st.integers(1, 40), operations)
def test_host_memory_is_a_bounded_lru_that_hands_down_what_leaves(limit, ops):
    tier = HostTier(limit)
    run_against_model(tier, Model(limit, 0), ops, returns=True)
    assert tier.used == sum(d.nbytes for d in tier._items.values()) <= limit


@settings(max_examples=40)
@given(limit=st.integers(1, 4 * OVERHEAD + 30), ops=operations)
def test_a_folder_is_a_bounded_lru(tmp_path_factory, limit, ops):
    folder = tmp_path_factory.mktemp("disk")
    run_against_model(DiskTier(folder, limit), Model(limit, OVERHEAD), ops, returns=False)
    assert sum(f.stat().st_size for f in folder.iterdir()) <= limit


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 30))
def test_making_room_frees_at_least_what_is_needed_and_less_than_that_plus_the_largest(sizes, new):
    tier = HostTier(60)
    tier.write([(key(i), data(i, s)) for i, s in enumerate(sizes)], frozenset())
    free = tier.limit - tier.used
    left = tier.write([(key(99), data(99, new))], frozenset())
    freed, missing = sum(d.nbytes for _, d in left), new - free
    assert tier.has(key(99))
    assert (freed == 0) if missing <= 0 else (missing <= freed < missing + max(d.nbytes for _, d in left))


def test_a_block_larger_than_the_tier_goes_straight_down_and_displaces_nothing(tmp_path):
    host, disk = HostTier(20), DiskTier(tmp_path, 200)
    for tier in (host, disk):
        tier.write([(key(1), data(1))], frozenset())
    big = (key(2), data(2, 300))
    assert host.write([big], frozenset()) == [big] and disk.write([big], frozenset()) == []
    for tier in (host, disk):
        assert tier.has(key(1)) and not tier.has(key(2))


# --- what can happen to a folder ---


def written(folder, n=1, limit=10_000) -> DiskTier:
    tier = DiskTier(folder, limit)
    tier.write([(key(i), data(i)) for i in range(n)], frozenset())
    return tier


def test_another_process_finds_what_was_written(tmp_path):
    written(tmp_path, 3)
    assert [torch.equal(DiskTier(tmp_path, 10_000).read(key(i)), data(i)) for i in range(3)] == [True] * 3


@settings(max_examples=80)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.integers(0, 10 + OVERHEAD), grow=st.binary(max_size=3),
       how=st.sampled_from(["flip", "cut", "grow"]))  # fmt: skip
def test_a_damaged_file_is_dropped_and_never_read(tmp_path_factory, at, bit, cut, grow, how):
    tier = written(tmp_path_factory.mktemp("disk"))
    path = tier.path(key(0))
    raw = bytearray(path.read_bytes())
    if how == "flip":
        raw[int(at * len(raw))] ^= 1 << bit
    elif how == "cut":
        raw = raw[: min(cut, len(raw) - 1)]
    else:
        raw += grow or b"x"
    path.write_bytes(raw)
    assert tier.read(key(0)) is None and not tier.has(key(0)) and not path.exists()
    tier.write([(key(0), data(0))], frozenset())
    assert torch.equal(tier.read(key(0)), data(0)), "it can be written again"


def test_a_good_file_under_another_name_is_foreign(tmp_path):
    tier = written(tmp_path)
    tier.path(key(0)).rename(tier.path(key(1)))
    assert tier.read(key(1)) is None and tier.read(key(0)) is None


def test_a_damaged_file_that_cannot_be_deleted_is_not_offered_again(tmp_path, monkeypatch):
    tier = written(tmp_path)
    tier.path(key(0)).write_bytes(b"junk")
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))
    assert tier.read(key(0)) is None and not tier.has(key(0))
    monkeypatch.undo()
    tier.write([(key(0), data(0))], frozenset())
    assert torch.equal(tier.read(key(0)), data(0))


def test_a_missing_file_and_a_missing_folder_are_misses(tmp_path):
    tier = written(tmp_path / "kv", 2)
    tier.path(key(0)).unlink()
    assert tier.read(key(0)) is None
    tier.path(key(1)).unlink()
    (tmp_path / "kv").rmdir()
    assert tier.read(key(1)) is None
    tier.write([(key(3), data(3))], frozenset())
    assert not tier.has(key(3)) and not tier.on


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"folder{SUFFIX}").mkdir()
    tier = written(tmp_path, 5, limit=2 * (10 + OVERHEAD))
    assert [tier.has(key(i)) for i in range(5)] == [False, False, False, True, True]
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / f"folder{SUFFIX}").is_dir()


def test_a_full_disk_switches_the_tier_off_with_a_warning_and_leaves_no_half_file(tmp_path, monkeypatch, caplog):
    tier = written(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING):
        assert tier.write([(key(5), data(5))], frozenset()) == []
    assert "switched off" in caplog.text and "No space left" in caplog.text
    assert not tier.on and not tier.has(key(0)) and tier.read(key(0)) is None
    assert tier.write([(key(6), data(6))], frozenset()) == []
    assert [f.suffix for f in tmp_path.iterdir()] == [SUFFIX]


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    tier, replace, seen = DiskTier(tmp_path, 10_000), os.replace, []

    def watching(part, path):
        seen.append((str(part), path.exists(), os.path.getsize(part)))
        replace(part, path)

    monkeypatch.setattr(os, "replace", watching)
    tier.write([(key(0), data(0))], frozenset())
    ((part, there, size),) = seen
    assert part.endswith(".part") and not there and size == 10 + OVERHEAD


def test_a_folder_that_cannot_be_made_switches_the_tier_off(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        tier = DiskTier(tmp_path / "file" / "kv", 1000)
    assert not tier.on and "switched off" in caplog.text and not tier.has(key(0))


def test_half_written_files_are_never_read_and_old_ones_are_removed(tmp_path):
    old, young = tmp_path / "a.part", tmp_path / "b.part"
    for part in (old, young):
        part.write_bytes(b"half")
    os.utime(old, (1, 1))
    written(tmp_path)
    assert not old.exists() and young.exists()


def test_only_the_owner_can_read_the_folder(tmp_path):
    written(tmp_path / "kv")
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) & 0o077 == 0


def test_many_writers_on_one_folder_never_show_each_other_half_a_file(tmp_path):
    limit = 6 * (4000 + OVERHEAD)

    def work(worker):
        tier = DiskTier(tmp_path, limit)
        for turn in range(30):
            i = (worker + turn) % 9
            tier.write([(key(i), data(i, 4000))], frozenset())
            for j in range(9):
                got = tier.read(key(j))
                assert got is None or torch.equal(got, data(j, 4000))
        return tier.on

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    DiskTier(tmp_path, limit).write([(key(20), data(20, 4000))], frozenset())
    assert sum(f.stat().st_size for f in tmp_path.glob(f"*{SUFFIX}")) <= limit
