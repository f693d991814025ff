"""Places for KV blocks that the pool has no room for: host memory, and a folder on disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import AbstractSet, Iterator, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("minillm")
Item = tuple[bytes, Tensor]
"""A block's key and its bytes, uint8 [nbytes]. Nobody changes the bytes of an item."""


def chain_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """A key for each full block: SHA-256 of the key before it and the block's tokens, so that it names the whole prefix."""
    full = len(token_ids) // block_size
    tokens = np.asarray(token_ids[: full * block_size], dtype=np.int64).reshape(full, block_size)
    keys, key = [], root
    for block in tokens:
        key = hashlib.sha256(key + block.tobytes()).digest()
        keys.append(key)
    return keys


class Tier(Protocol):
    """Keeps the blocks it is given for as long as there is room, and lets the least recently used ones go first."""

    name: str

    def has(self, key: bytes) -> bool:
        """Whether a read of the key is worth trying."""
        ...

    def use(self, key: bytes) -> bool:
        """has, and from now on the key is the one used last."""
        ...

    def read(self, key: bytes) -> Tensor | None:
        """The bytes that were written under the key, and no others; None if they are not whole any more. Counts as a use."""
        ...

    def write(self, items: Sequence[Item], pending: AbstractSet[bytes]) -> list[Item]:
        """Keep the items, in order, the last one longest; one that is here already is only used again. Returns what had to leave
        or found no room, oldest first, for the next tier. A block whose key is pending is about to be read and never leaves."""
        ...


class HostTier:
    """Plain memory, `limit` bytes of it."""

    name = "host"

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._items: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._items)

    def has(self, key: bytes) -> bool:
        return key in self._items

    def use(self, key: bytes) -> bool:
        if key in self._items:
            self._items.move_to_end(key)
        return key in self._items

    def read(self, key: bytes) -> Tensor | None:
        return self._items[key] if self.use(key) else None

    def write(self, items: Sequence[Item], pending: AbstractSet[bytes]) -> list[Item]:
        left: list[Item] = []
        for key, data in items:
            if self.use(key):
                continue
            left += self._make_room(data.nbytes, pending)
            if self.used + data.nbytes > self.limit:
                left.append((key, data))
                continue
            self._items[key] = data
            self.used += data.nbytes
        return left

    def forget(self, key: bytes) -> None:
        data = self._items.pop(key, None)
        self.used -= 0 if data is None else data.nbytes

    def _make_room(self, num_bytes: int, pending: AbstractSet[bytes]) -> list[Item]:
        """Let the oldest go until num_bytes fit, and no more than that; none where it would not help."""
        free = self.limit - self.used
        gone: list[bytes] = []
        for key, data in self._items.items():
            if free >= num_bytes:
                break
            if key not in pending:
                gone.append(key)
                free += data.nbytes
        if free < num_bytes:
            return []
        left = [(key, self._items.pop(key)) for key in gone]
        self.used -= sum(data.nbytes for _, data in left)
        return left


MAGIC = b"minikv1\n"
AROUND = len(MAGIC) + 2 * hashlib.sha256().digest_size
"""Bytes of a file besides the block: the mark, the key, the hash."""
SUFFIX, PART = ".kv", ".part"
ABANDONED_AFTER = 3600.0  # seconds: a half-written file so old belongs to a process that died


class DiskTier:
    """Files in one folder, `limit` bytes of them in all; several processes may use it at once.

    A file holds a mark, its key, a block's bytes and a SHA-256 of all that. It appears whole, by renaming, or not at all.
    What is not exactly as written (damaged, cut off, renamed, of another version) is dropped and counts as absent. A folder
    that cannot be written switches the tier off with a warning. Least recently used is told by the files' modification times.
    """

    name = "disk"

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.on = True
        self._newest = 0
        self._bad: set[bytes] = set()  # damaged files that could not even be deleted
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # KV tells what was asked: it is nobody else's business
        except OSError as error:
            self._switch_off(error)

    def has(self, key: bytes) -> bool:
        return self.on and key not in self._bad and os.path.isfile(self.path(key))

    def path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def use(self, key: bytes) -> bool:
        here = self.has(key)
        if here:
            self._mark_used(self.path(key))
        return here

    def read(self, key: bytes) -> Tensor | None:
        if not self.has(key):
            return None
        path = self.path(key)
        try:
            raw = np.fromfile(path, dtype=np.uint8)
        except FileNotFoundError:  # another process needed the room
            return None
        except OSError as error:
            log.warning("a cached block cannot be read and is computed again: %s", error)
            self._bad.add(key)
            return None
        if not _is_whole(raw, key):
            log.warning("a cached block on disk is damaged and is computed again: %s", path)
            self._bad.add(key)
            self.forget(key)
            return None
        self._mark_used(path)
        return torch.from_numpy(raw)[len(MAGIC) + len(key) : -hashlib.sha256().digest_size]

    def write(self, items: Sequence[Item], pending: AbstractSet[bytes]) -> list[Item]:
        """Nothing is below a disk: what leaves is deleted, and nothing is returned."""
        if not self.on:
            return []
        try:
            self._write(items, {self.path(key) for key in pending})
        except OSError as error:
            self._switch_off(error)
        return []

    def forget(self, key: bytes) -> None:
        with contextlib.suppress(OSError):
            self.path(key).unlink(missing_ok=True)

    def _write(self, items: Sequence[Item], pending: AbstractSet[Path]) -> None:
        files = dict(self._files())  # the folder's own word, since other processes write there too
        used = sum(files.values())
        for key, data in items:
            path = self.path(key)
            if path in files and key not in self._bad:
                files[path] = files.pop(path)
                self._mark_used(path)
                continue
            size = data.nbytes + AROUND
            oldest = [p for p in files if p not in pending]
            while used + size > self.limit and oldest and size <= self.limit:
                gone = oldest.pop(0)
                gone.unlink(missing_ok=True)
                used -= files.pop(gone)
            if used + size > self.limit:
                continue
            self._create(path, key, data)
            self._bad.discard(key)
            files[path] = size
            used += size

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Blocks in the folder with their sizes, least recently used first. What a dead process left half-written is removed."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not entry.name.endswith((SUFFIX, PART)) or not entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        found.append((info.st_mtime_ns, Path(entry.path), info.st_size))
                    elif info.st_mtime < time.time() - ABANDONED_AFTER:
                        os.unlink(entry.path)
        return ((path, size) for _, path, size in sorted(found))

    def _create(self, path: Path, key: bytes, data: Tensor) -> None:
        part = tempfile.NamedTemporaryFile(dir=self.folder, suffix=PART, delete=False)
        try:
            with part:
                digest = hashlib.sha256()
                for piece in (MAGIC, key, data.numpy().data):
                    digest.update(piece)
                    part.write(piece)
                part.write(digest.digest())
            self._mark_used(Path(part.name))
            os.replace(part.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part.name)
            raise

    def _mark_used(self, path: Path) -> None:
        """Mark a file as the one used last. Two uses within a tick of the file system's clock keep their order."""
        self._newest = max(time.time_ns(), self._newest + 1)
        with contextlib.suppress(OSError):  # another process deleted it
            os.utime(path, ns=(self._newest, self._newest))

    def _switch_off(self, error: OSError) -> None:
        self.on = False
        log.warning("the disk cache in %s is switched off, and what it held is computed again: %s", self.folder, error)


def _is_whole(raw: np.ndarray, key: bytes) -> bool:
    """Whether a file's bytes are those that were written under this key."""
    size = hashlib.sha256().digest_size
    if len(raw) < len(MAGIC) + len(key) + size or raw[: len(MAGIC) + len(key)].tobytes() != MAGIC + key:
        return False
    return hashlib.sha256(raw[:-size].data).digest() == raw[-size:].tobytes()
