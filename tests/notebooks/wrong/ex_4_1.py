"""Wrong answers to exercise 4.1, each with the check that must catch it."""

from __future__ import annotations

from collections import deque

from minillm.cache.block_pool import BlockPool


class Right:
    """What the core's answers below are variations of."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = deque(range(1, num_blocks + 1))
        self.refs = [0] * (num_blocks + 1)

    def allocate(self, n):
        if n > len(self.free):
            return None
        blocks = [self.free.popleft() for _ in range(n)]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def acquire(self, blocks):
        for block in blocks:
            if not self.refs[block]:
                raise RuntimeError("free")
        for block in blocks:
            self.refs[block] += 1

    def release(self, blocks):
        freed = []
        for block in reversed(blocks):
            if not self.refs[block]:
                raise RuntimeError("free")
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)
                freed.append(block)
        return freed

    def slot(self, table, position):
        return table[position // self.block_size] * self.block_size + position % self.block_size


class ATuple(Right):
    def allocate(self, n):
        blocks = super().allocate(n)
        return blocks if blocks is None else tuple(blocks)


class SaysNothing(Right):
    def release(self, blocks):
        super().release(blocks)


class GivesWhatThereIs(Right):
    def allocate(self, n):
        return super().allocate(min(n, len(self.free)))


class NoticesTooLate(Right):
    def allocate(self, n):
        blocks = []
        for _ in range(n):
            if not self.free:
                return None
            blocks.append(self.free.popleft())
            self.refs[blocks[-1]] = 1
        return blocks


class KeepsThemInTheList(Right):
    def allocate(self, n):
        blocks = [b for b in self.free if not self.refs[b]][:n]
        for block in blocks:
            self.refs[block] = 1
        return blocks if len(blocks) == n else None


class FreesAtOnce(Right):
    """The first holder to leave frees the block."""

    def release(self, blocks):
        for block in reversed(blocks):
            self.refs[block] = 0
            self.free.append(block)
        return list(reversed(blocks))


class Leaks(Right):
    """Says what became free, and does not put it back."""

    def release(self, blocks):
        freed = super().release(blocks)
        for block in freed:
            self.free.remove(block)
        return freed


class HeadFirst(Right):
    def release(self, blocks):
        return super().release(list(reversed(blocks)))


class DoesNotCount(Right):
    def acquire(self, blocks):
        pass


class OffsetFirst(Right):
    def slot(self, table, position):
        return table[position % len(table)] * self.block_size + position // len(table)


class SlotsOfTheIndex(Right):
    def slot(self, table, position):
        return table[position // self.block_size] + position % self.block_size


class NothingIsNone(Right):
    def allocate(self, n):
        return super().allocate(n) or None


class OneIsAlwaysKept(Right):
    def allocate(self, n):
        return super().allocate(n) if n < len(self.free) or n < 2 < len(self.refs) else None


class SharesFreeBlocks(Right):
    def acquire(self, blocks):
        for block in blocks:
            self.refs[block] += 1


class CountsUntilItFails(Right):
    def acquire(self, blocks):
        for block in blocks:
            if not self.refs[block]:
                raise RuntimeError("free")
            self.refs[block] += 1


class FreesTwice(Right):
    def release(self, blocks):
        freed = []
        for block in reversed(blocks):
            self.refs[block] = max(self.refs[block] - 1, 0)
            if not self.refs[block]:
                self.free.append(block)
                freed.append(block)
        return freed


class EmptiesTheTable(Right):
    def release(self, blocks):
        freed = super().release(list(blocks))
        blocks.clear()
        return freed


class OnePoolForAll(Right):
    pools: dict = {}

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free = self.pools.setdefault(num_blocks, self.free)


class Borrows(Right):
    def allocate(self, n):
        BlockPool(len(self.refs) - 1).allocate(n)
        return super().allocate(n)


HAND, RANDOM = "exact: four blocks and two tables by hand", "random: against tables written down"
NOTHING, MISUSE = "edges: nothing, and a pool of one block", "edges: blocks that nobody holds"
STATE = "state: pools and tables are independent"
CORE = (
    (ATuple, "shape"), (SaysNothing, "shape"), (Borrows, "shape"), (GivesWhatThereIs, HAND), (NoticesTooLate, HAND),
    (KeepsThemInTheList, HAND), (FreesAtOnce, HAND), (Leaks, HAND), (HeadFirst, HAND), (DoesNotCount, HAND), (OffsetFirst, HAND),
    (SlotsOfTheIndex, HAND), (OneIsAlwaysKept, RANDOM), (NothingIsNone, RANDOM), (SharesFreeBlocks, MISUSE),
    (CountsUntilItFails, MISUSE), (FreesTwice, MISUSE), (EmptiesTheTable, STATE), (OnePoolForAll, HAND),
)  # fmt: skip


# --- break ---


def right(pool, table, start, stop, size, everything=False, count=0):
    last = -(-stop // size)
    first = 0 if everything else start // size
    shared = [i for i in range(first, min(last, len(table))) if pool.ref_count(table[i]) > 1]
    fresh = pool.allocate(len(shared) + max(count, last - len(table)))
    if fresh is None:
        return None
    copies = []
    for i in shared:
        copies.append((table[i], fresh.pop(0)))
        pool.release([table[i]])
        table[i] = copies[-1][1]
    table.extend(fresh)
    return copies


def shipped(pool, table, start, stop, size):
    missing = -(-stop // size) - len(table)
    if missing > 0:
        fresh = pool.allocate(missing)
        if fresh is None:
            return None
        table.extend(fresh)
        return []
    return right(pool, table, start, stop, size)


def never_copies(pool, table, start, stop, size):
    fresh = pool.allocate(max(0, -(-stop // size) - len(table)))
    if fresh is None:
        return None
    table.extend(fresh)
    return []


def copies_all_that_is_shared(pool, table, start, stop, size):
    return right(pool, table, start, stop, size, everything=True)


def keeps_the_source(pool, table, start, stop, size):
    before = list(table)
    copies = right(pool, table, start, stop, size)
    pool.acquire(source for source, _ in copies or () if source in before)
    return copies


def target_first(pool, table, start, stop, size):
    copies = right(pool, table, start, stop, size)
    return copies if copies is None else [(target, source) for source, target in copies]


def copies_and_asks_then(pool, table, start, stop, size):
    copies = right(pool, table, start, min(stop, len(table) * size), size) if table else []
    if copies is None:
        return None
    fresh = pool.allocate(max(0, -(-stop // size) - len(table)))
    if fresh is None:
        return None
    table.extend(fresh)
    return copies


def only_the_last(pool, table, start, stop, size):
    """Copies one block at most, and grows."""
    return right(pool, table, max(start, (len(table) - 1) * size), stop, size)


def one_block_ahead(pool, table, start, stop, size):
    return right(pool, table, start, stop + 1, size)


def a_dict(pool, table, start, stop, size):
    return dict(right(pool, table, start, stop, size) or ())


ONE, MORE, CROSSING = "exact: one more token", "random: one token at a time", "edges: a write across blocks"
BREAK = (
    (a_dict, "shape"), (shipped, CROSSING), (never_copies, ONE), (copies_all_that_is_shared, ONE), (keeps_the_source, ONE),
    (target_first, ONE), (only_the_last, CROSSING), (one_block_ahead, MORE),
    (copies_and_asks_then, "edges: a pool that is used up"),
)  # fmt: skip


# --- stretch ---


def step_by_step(prompt, output, size):
    allocated = live = 0
    for n in range(prompt, prompt + min(output, 10_000)):
        allocated += -(-n // size) * size
        live += n
    return allocated, live


def exact_strip(prompt, output, size):
    return output * -(-(prompt + output - 1) // size) * size, output * (2 * prompt + output - 1) // 2


def one_step_more(prompt, output, size):
    return tuple(a + b for a, b in zip(step_by_step(prompt, output, size), step_by_step(prompt + output, 1, size)))


def half_a_block(prompt, output, size):
    live = output * (2 * prompt + output - 1) // 2
    return live + output * (size - 1) // 2, live


def a_block_too_many(prompt, output, size):
    """A new block as soon as the last one is full."""
    return sum((n // size + 1) * size for n in range(prompt, prompt + output)), output * (2 * prompt + output - 1) // 2


def floats(prompt, output, size):
    allocated, live = step_by_step(prompt, output, size)
    return allocated / 1, live / 1


def from_the_prompts_end(prompt, output, size):
    """Blocks counted as if the prompt ended at the end of a block."""
    grown = step_by_step(1, output - 1, size)[0] if output > 1 else 0
    return output * -(-prompt // size) * size + grown, output * (2 * prompt + output - 1) // 2


LIVES = "exact: four tokens by hand"
STRETCH = (
    (floats, "shape"), (exact_strip, LIVES), (one_step_more, LIVES), (half_a_block, LIVES), (a_block_too_many, LIVES),
    (from_the_prompts_end, LIVES), (step_by_step, "budget: work that does not grow with the answer"),
)  # fmt: skip

WRONG = {"4.1 core": CORE, "4.1 break": BREAK, "4.1 stretch": STRETCH}
