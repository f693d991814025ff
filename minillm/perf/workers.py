"""OpenMP's worker threads: every thread that computes has its own, and those of an idle thread slow down the others."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Callable

import torch  # noqa: F401  it brings the OpenMP library that is looked for below

MAPS = Path("/proc/self/maps")
_HARD = 2  # omp_pause_hard: give up everything that can be made again


def release_workers() -> None:
    """End the idle OpenMP workers of the calling thread; its next parallel operator makes new ones (some 50 microseconds).

    Call it before computing goes on in another thread. torch cuts an operator into one part for each core, and its workers wait
    for the next operator actively. When the workers of all threads together outnumber the cores, GNU's OpenMP has them sleep
    instead, also those that are in use (libgomp's "throttled" spin count), and each of the hundreds of operators of a step then
    waits for a sleeper to wake. On two cores, a decoding step of a small model took 1.4 times as long (1.2 to 1.9) while a second
    thread that did nothing had once used its workers.

    Does nothing where torch uses another OpenMP library than GNU's.
    """
    for pause in _pausers():
        pause(_HARD)  # not done, with a status that says so, inside a parallel region: nothing is lost


@cache
def _pausers() -> tuple[Callable[[int], int], ...]:
    """omp_pause_resource_all of each libgomp in this process. LLVM's library would also end the workers of other threads."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "/libgomp" in line}
        return tuple(ctypes.CDLL(path).omp_pause_resource_all for path in sorted(paths))
    except (OSError, AttributeError):  # no such list on this system; a libgomp older than OpenMP 5.0
        return ()
