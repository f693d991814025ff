"""Copy on write: which blocks take over the content of a shared one, from the plan until a step has copied it."""

from __future__ import annotations

from collections import Counter
from typing import Callable, Iterable, Sequence

from minillm.cache.block_pool import BlockPool


class Copies:
    """Copies between blocks of a pool. A source stays referenced until its copy has run: nobody writes to it any more.

    release: gives references on blocks back; whoever it is asks ``forget`` about what became free by it.
    """

    def __init__(self, pool: BlockPool, release: Callable[[Iterable[int]], None]):
        self.pool, self.release = pool, release
        self._source_of: dict[int, int] = {}  # by target; only of copies that no step has taken along yet
        self._kept: Counter[int] = Counter()  # references on sources, of copies that are planned or in flight

    @property
    def planned(self) -> list[tuple[int, int]]:
        """(source, target) blocks to copy before anything is computed in the next step."""
        return [(source, target) for target, source in self._source_of.items()]

    def plan(self, block: int, target: int) -> None:
        """The target is to have the block's content. A block that is itself still to be copied has its content elsewhere."""
        self._source_of[target] = source = self._source_of.get(block, block)
        self._keep(source)

    def forget(self, freed: Iterable[int]) -> None:
        """Nobody holds these blocks any more: nothing is copied to them."""
        sources = [self._source_of.pop(b) for b in freed if b in self._source_of]
        if sources:
            self._give_back(sources)

    def launched(self) -> None:
        """What was planned is on its way, with a step that hands it back in the end, done or failed."""
        self._source_of = {}

    def done(self, copies: Sequence[tuple[int, int]]) -> None:
        """These have run."""
        self._give_back(source for source, _ in copies)

    def failed(self, copies: Sequence[tuple[int, int]]) -> None:
        """Nobody knows which of them have run: they are to run again. Those of the youngest step first."""
        for source, target in copies:
            for other, its_source in self._source_of.items():
                if its_source == target:  # which has not got its content
                    self._source_of[other] = source
                    self._keep(source)
                    self._give_back([target])
            self._source_of[target] = source

    def holders(self, block: int) -> int:
        """Requests that have the block in their tables. A copy of it reads what nobody writes any more: it is no holder."""
        return self.pool.ref_count(block) - self._kept[block]

    @property
    def num_sharing(self) -> int:
        """References by which a source counts as shared without a second request: its copy's, beside another or in its place."""
        return sum(n if self.holders(block) else n - 1 for block, n in self._kept.items())

    def _keep(self, block: int) -> None:
        self.pool.acquire([block])
        self._kept[block] += 1

    def _give_back(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._kept.subtract(blocks)
        self._kept += Counter()  # forget those that nobody copies any more
        self.release(blocks)
