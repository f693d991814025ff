"""The GGUF format: metadata by key, and tensors dequantised one at a time.

The header is parsed here because `gguf.GGUFReader` makes several array views per vocabulary entry (two seconds for a
vocabulary of 49,152) and trusts the sizes that a file states. Block layouts and dequantisation are the library's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from torch import Tensor

_SCALARS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.INT8: "<b", GGUFValueType.UINT16: "<H", GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i", GGUFValueType.UINT64: "<Q", GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f", GGUFValueType.FLOAT64: "<d", GGUFValueType.BOOL: "<?",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file. shape is in torch's order; offset and size are in bytes."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


class GGUFFile:
    """An open GGUF file: its metadata by key, its tensors by name. A file that breaks the format is a ValueError."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self._bytes)
        try:
            self.metadata, self.tensors = header.read()
        except (ValueError, struct.error, RecursionError, MemoryError) as error:
            raise ValueError(f"{self.path} has a broken header at byte {header.position}: {error}") from error
        for name, tensor in self.tensors.items():
            if tensor.offset + tensor.size > len(self._bytes):
                raise ValueError(
                    f"{self.path} is truncated: {name} ends at byte {tensor.offset + tensor.size}, the file at {len(self._bytes)}"
                )

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        tensor = self.tensors[name]
        stored = np.frombuffer(self._bytes, np.uint8, tensor.size, tensor.offset)
        try:
            values = gguf.dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"tensor {name} of {self.path} is {tensor.kind.name}, which gguf cannot dequantise") from error
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"])).reshape(tensor.shape)


class _Header:
    """A cursor over the header. Every length is checked against what is left of the file before it is believed."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = 4

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        version = self.scalar("<I")
        if version not in (2, 3):
            order = " (written for a big-endian machine?)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"GGUF version {version}{order}; minillm reads versions 2 and 3")
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise ValueError(f"key {key!r} occurs twice")
            metadata[key] = self.value(self.scalar("<I"))
        stored: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            name = self.string()
            if name in stored:
                raise ValueError(f"tensor {name!r} occurs twice")
            stored[name] = self.tensor(name)
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        return metadata, {n: StoredTensor(t.kind, t.shape, start + t.offset, t.size) for n, t in stored.items()}

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self.data, self.position)
        self.position += struct.calcsize(format)
        return value

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise ValueError(f"{size} bytes announced, {len(self.data) - self.position} left in the file")
        self.position += size
        return self.data[self.position - size : self.position]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[GGUFValueType(kind)])
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            raise ValueError(f"unknown value type {kind}")
        kind, length = self.scalar("<I"), self.scalar("<Q")
        if kind in _SCALARS:
            item = np.dtype(_SCALARS[GGUFValueType(kind)])
            return np.frombuffer(self.take(length * item.itemsize), item).tolist()
        return [self.value(kind) for _ in range(length)]

    def tensor(self, name: str) -> StoredTensor:
        rank = self.scalar("<I")
        if not 1 <= rank <= 4:
            raise ValueError(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(rank)]))  # the file states the fastest dimension first
        kind = GGMLQuantizationType(self.scalar("<I"))
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block or 0 in shape:
            raise ValueError(f"tensor {name!r} of shape {shape} does not divide into {kind.name} blocks of {block}")
        return StoredTensor(kind, shape, self.scalar("<Q"), math.prod(shape) // block * block_bytes)
