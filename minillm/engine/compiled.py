"""compile=True: the decode step as one ahead-of-time compiled library, kept on disk.

The step is the same Transformer.forward; torch.export traces it with plain weights, or with the codes of quantised ones, and
AOTInductor turns it into C++ that keeps the weights packed for the CPU's matrix units. It removes what half of an eager step is:
Python, dispatch, small operators.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping, Sequence

import torch
from filelock import FileLock
from torch import Tensor, nn

from minillm.attention import torch_backend
from minillm.attention.backend import AttentionBackend
from minillm.attention.torch_backend import RowGroup, TorchAttention
from minillm.cache import kv_store
from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.engine.batch import ForwardBatch
from minillm.identity import identity
from minillm.model import layers, transformer
from minillm.model.transformer import Transformer
from minillm.paths import cache_dir
from minillm.perf.processor import has_matrix_units
from minillm.quant import group_linear, linear
from minillm.quant.linear import Linear, for_rows

log = logging.getLogger("minillm")
SOURCES: tuple[ModuleType, ...] = (transformer, layers, linear, group_linear, torch_backend, kv_store)
KEPT_PACKAGES = 6


class CompileUnavailable(RuntimeError):
    """This machine or this engine cannot run a compiled step; the message says why. The engine then runs eagerly."""


class DecodeStep(nn.Module):
    """The forward pass of rows that all decode one token, with every input a tensor: what torch.export traces."""

    def __init__(self, model: Transformer, window: int | None):
        super().__init__()
        self.model, self.backend = model, TorchAttention(window)

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv_slots: Tensor, mask: Tensor, kv: Sequence[Tensor]
    ) -> Tensor:
        """Arguments as ``decode_rows`` takes them; kv: the store's layers. Returns logits [rows, vocab]."""
        return decode_rows(self.model, PlainKVStore(kv), self.backend, token_ids, positions, slots, kv_slots, mask)


def decode_rows(
    model: Transformer, store: KVStore, backend: AttentionBackend, token_ids: Tensor, positions: Tensor, slots: Tensor,
    kv_slots: Tensor, mask: Tensor,
) -> Tensor:  # fmt: skip
    """One token of every row, in a form whose shape is all that varies.

    token_ids, positions, slots [rows]; kv_slots [rows, keys]; mask [rows, 1, 1, keys]. Returns logits [rows, vocab]."""
    every_row = torch.arange(token_ids.shape[0], device=token_ids.device)
    batch = ForwardBatch(token_ids, positions, slots, (), (), (), 1, every_row)
    return model(batch, store, backend, [RowGroup(slice(0, None), 1, kv_slots, mask)])


def all_decode(batch: ForwardBatch) -> bool:
    """Whether every row computes one token, and every row of a request wants its logits."""
    return set(batch.q_lens) == {1} and len(batch.logit_indices) == batch.num_rows - batch.num_padding


class CompiledDecode:
    """Runs a batch in which every row computes one token and wants its logits.

    models: as ``Transformer.traced`` gives them, by the fewest rows that each is for: quantised weights have a step that
    multiplies by codes, and one for many rows that multiplies by their copy in 16 bits. Of each a step is compiled and, to count
    its work, the shapes are kept. weight_bytes: what the compiled steps hold for themselves, whatever else the engine holds.
    """

    fused = True

    def __init__(self, models: Mapping[int, Transformer], store: PlainKVStore, backend: TorchAttention):
        self.store, self.backend = store, backend
        self.weight_bytes = sum(model.weight_bytes() for model in models.values())
        self._steps: dict[int, Callable[..., Tensor]] = {}
        self._shapes: dict[int, Transformer] = {}
        for fewest, model in models.items():
            package = find_or_build(model, store, backend.window, few=fewest < max(models))
            self._steps[fewest] = torch._inductor.aoti_load_package(str(package))
        for fewest, model in models.items():  # not before all are built: they share layers
            self.dtype, self._shapes[fewest] = model.dtype, model.to("meta")

    @property
    def description(self) -> str:
        """For which rows a step of its own was compiled."""
        bounds = list(self._steps)
        spans = ["1 row" if b == 2 else f"{a} to {b - 1} rows" for a, b in pairwise(bounds)]
        return "decode compiled" + (f" for {', '.join(spans)} and {bounds[-1]} on" if spans else "")

    def accepts(self, batch: ForwardBatch) -> bool:
        return all_decode(batch)

    def model_for(self, rows: int) -> Transformer:
        """The model, without values, that a step of so many rows computes: the work of the step is counted from it."""
        return for_rows(self._shapes, rows)

    def plan(self, batch: ForwardBatch) -> list[RowGroup]:
        return [self.backend.single_group(batch, self.dtype)]

    def run(self, batch: ForwardBatch, plan: list[RowGroup]) -> Tensor:
        """Logits of the rows that want them."""
        logits = self.step(batch.token_ids, batch.positions, batch.slots, plan[0].slots, plan[0].mask)
        return logits[: len(batch.logit_indices)]

    def step(self, token_ids: Tensor, *inputs: Tensor | None) -> Tensor:
        """What ``decode_rows`` computes from the same tensors."""
        return for_rows(self._steps, len(token_ids))(token_ids, *inputs, self.store.layers)


def find_or_build(model: Transformer, store: PlainKVStore, window: int | None, few: bool = False) -> Path:
    """The compiled package of a traced model on this machine; built at the first call, found at later ones. few: another package
    serves many rows, and this one is made for one or two."""
    if model.device.type != "cpu":
        raise CompileUnavailable(f"the compiled step is built for a CPU, the model is on {model.device}")
    folder = cache_dir() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileUnavailable(f"there is no place to keep it: {error}") from error
    package = folder / f"{model.config.name.replace('/', '_')}-{fingerprint(model, store, window, few)}.pt2"
    with FileLock(f"{package}.lock"):  # two engines that start at once compile once
        if not _is_whole(package):
            if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
                raise CompileUnavailable("no C++ compiler was found; install g++ or clang++")
            what = f"{model.config.name}{' for few rows' if few else ''}"
            log.warning("compiling the decode step of %s: a minute or two, once; kept in %s", what, folder)
            started = time.monotonic()
            try:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    os.replace(_build(model, store, window, few, Path(scratch) / "step.pt2"), package)
            except Exception as error:  # what torch.export, its compiler and a full disk raise has no common type
                reason = str(error).strip().split("\n")[0]
                raise CompileUnavailable(f"torch could not compile the step ({type(error).__name__}: {reason})") from error
            log.warning("compiled in %.0f s", time.monotonic() - started)
            _prune(folder, keep=package)
    os.utime(package)
    return package


def _build(model: Transformer, store: PlainKVStore, window: int | None, few: bool, target: Path) -> Path:
    from torch.export import Dim, export
    from torch.fx.experimental import _config

    shapes: Any = _config

    step = DecodeStep(model, window)
    rows, keys, slots = Dim("rows", min=1), Dim("keys", min=2), Dim("slots", min=2)
    dynamic = ({0: rows}, {0: rows}, {0: rows}, {0: rows, 1: keys}, {0: rows, 3: keys}, [{0: slots}] * len(store.layers))
    m, n = 4, 32  # any sizes serve as an example; 1 would be taken for a constant
    tokens, positions, at = (torch.arange(m) for _ in range(3))  # three tensors: one given thrice would be traced as one input
    example = (
        tokens,
        positions,
        at,
        torch.ones(m, n, dtype=torch.int64),
        torch.zeros(m, 1, 1, n, dtype=model.dtype),
        store.layers,
    )
    # inductor's autotuner writes its tables to stderr; they belong to nobody who asked for an answer
    quiet = contextlib.redirect_stderr(io.StringIO())
    # sizes stay symbolic even where they are 1, so that one package serves every number of rows
    with torch.inference_mode(False), torch.no_grad(), shapes.patch(backed_size_oblivious=True), warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        program = export(step, example, dynamic_shapes=dynamic)
        return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs=tuning(few)))


def tuning(few: bool) -> dict[str, Any]:
    """How torch's compiler looks for the products: what is fastest is tried out with the example's rows.

    That is not fastest with one or two rows: torch's kernels for codes are (8.5 ms a step in 4 bits against 12.2). Nor with many
    rows where there is no matrix unit: oneDNN is (16 rows on two cores of an AMD EPYC: 891 tokens/s against 473)."""
    ready = few or not has_matrix_units()
    return {"freezing": True, "max_autotune": True} | ({"max_autotune_gemm_backends": "ATEN"} if ready else {})


def fingerprint(model: Transformer, store: PlainKVStore, window: int | None, few: bool = False) -> str:
    """Everything that the compiled code depends on: weights, shapes, our source, torch, threads and the CPU's abilities."""
    digest = hashlib.blake2b(digest_size=12)
    for module in (*SOURCES, sys.modules[__name__]):
        digest.update(inspect.getsource(module).encode())
    capability = torch.backends.cpu.get_cpu_capability(), has_matrix_units()
    digest.update(
        repr(
            (model.config, model.dtype, window, few, len(store.layers), torch.__version__, torch.get_num_threads(), capability)
        ).encode()
    )
    for layer in model.modules():  # what ours compute, SOURCES and their tensors say; somebody's own has its own arithmetic
        if isinstance(layer, Linear) and not type(layer.method).__module__.startswith("minillm."):
            digest.update(repr(identity(layer.method)).encode())
    for name, tensor in model.named_buffers():  # the names and shapes say in which format a layer is
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_whole(package: Path) -> bool:
    """Whether the package is there and every byte as it was written: torch would run whatever it finds in a damaged one."""
    try:
        with zipfile.ZipFile(package) as archive:
            return bool(archive.namelist()) and archive.testzip() is None
    except Exception:  # whatever a damaged archive makes zipfile say: not found, no zip, encrypted, cut off
        return False


def _prune(folder: Path, keep: Path) -> None:
    """Packages hold a copy of the weights each: keep the few used last, and nothing of a build that was killed a day ago."""
    for scratch in folder.glob("tmp*/"):
        if scratch.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(scratch, ignore_errors=True)
    packages = sorted(folder.glob("*.pt2"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in packages[KEPT_PACKAGES:]:
        if old != keep:
            old.unlink(missing_ok=True)
