"""llama.cpp through llama-cpp-python's low-level interface: one llama_batch per step, one sequence per row."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from protocol import Handler, Prompts, serve, timed, versions  # type: ignore[import-not-found]  # run as a script: its folder is the path

MAX_ROWS, MAX_LENGTH = 32, 1024


def start(task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Handler]]:
    import llama_cpp as ll  # type: ignore[import-not-found]

    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(os.fsencode(task["gguf"]), ll.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {task['gguf']}")
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = MAX_ROWS * MAX_LENGTH, MAX_ROWS, task["options"]["unified"]
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = task["threads"]
    context = ll.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(params.n_batch, 0, 1)

    def run(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode (token, position, row, wants logits) entries; the greedy next token of those that want one, in order."""
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row
        status = ll.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [_argmax(ll.llama_get_logits_ith(context, i), vocab_size) for i, e in enumerate(entries) if e[3]]

    def generate(prompts: Prompts, new: list[int]) -> list[list[int]]:
        """Prompts go through in chunks of n_batch tokens, then every step has one token of each unfinished row."""
        if len(prompts) > MAX_ROWS:
            raise ValueError(f"{len(prompts)} rows, the context has {MAX_ROWS}")
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        queue = [(t, i, row, i == len(p) - 1) for row, p in enumerate(prompts) for i, t in enumerate(p)]
        outputs: list[list[int]] = [[] for _ in prompts]
        for at in range(0, len(queue), params.n_batch):
            chunk = queue[at : at + params.n_batch]
            for row, token in zip([e[2] for e in chunk if e[3]], run(chunk), strict=True):
                outputs[row].append(token)
        while alive := [row for row, out in enumerate(outputs) if len(out) < new[row]]:
            step = [(outputs[row][-1], len(prompts[row]) + len(outputs[row]) - 1, row, True) for row in alive]
            for row, token in zip(alive, run(step), strict=True):
                outputs[row].append(token)
        return outputs

    text = ctypes.create_string_buffer(256)
    ll.llama_model_desc(model, text, len(text))
    facts = {
        "versions": versions("llama_cpp_python", "numpy"), "dtype": "as the file stores it",
        "engine": f"{text.value.decode()}, {'one cache for all rows' if task['options']['unified'] else 'a cache for each row'}",
        "system": ll.llama_print_system_info().decode(), "weight_bytes": ll.llama_model_size(model),
    }  # fmt: skip
    return facts, timed(generate)


def _argmax(logits: Any, n: int) -> int:
    return int(np.ctypeslib.as_array(logits, shape=(n,)).argmax())


if __name__ == "__main__":
    serve(start)
