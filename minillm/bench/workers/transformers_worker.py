"""transformers: `generate` with a padded static batch, and its continuous batching for requests of mixed lengths."""

from __future__ import annotations

import os
from typing import Any

import torch
from protocol import Handler, Prompts, serve, timed, versions  # type: ignore[import-not-found]  # run as a script: its folder is the path

MANY = 300.0
"""Seconds to wait for one more result of continuous batching before it counts as hung."""


def start(task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Handler]]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=getattr(torch, task["options"]["dtype"])).eval()
    # no end-of-sequence token: every request runs to its length, without a logits processor that would have to forbid one
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True)

    def static(prompts: Prompts, new: list[int]) -> list[list[int]]:
        """One batch, padded on the left to the longest prompt and generated to the longest answer; the excess is thrown away."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max(new))
        return [row[longest : longest + n].tolist() for row, n in zip(out, new, strict=True)]

    tasks = timed(static)

    def mix(task: dict[str, Any]) -> dict[str, Any]:
        if task["method"] == "static":
            return tasks["mix"](task)
        with _continuous(model, task) as generate:
            return timed(generate)["mix"](task)

    facts = {
        "versions": versions("transformers", "torch", "accelerate", "numpy"), "dtype": task["options"]["dtype"],
        "engine": f"{type(model).__name__}, attention {model.config._attn_implementation}",
    }  # fmt: skip
    return facts, {**tasks, "mix": mix}


class _continuous:
    """The manager behind `generate_batch`, which takes one length for all requests: here each request brings its own.

    Its cache is made before the clock runs. Prompts share nothing, so sharing of blocks is left off.
    """

    def __init__(self, model: Any, task: dict[str, Any]):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        page = 32
        blocks = sum(-(-(len(p) + n) // page) for p, n in zip(task["prompts"], task["new"], strict=True)) + len(task["prompts"])
        self._manager = model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=max(task["new"])),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page, num_blocks=blocks, max_batch_tokens=2048, max_requests_per_batch=len(task["prompts"]),
                allow_block_sharing=False,
            ),
        )  # fmt: skip

    def __enter__(self) -> Any:
        manager = self._manager.__enter__()

        def generate(prompts: Prompts, new: list[int]) -> list[list[int]]:
            names = [manager.add_request(list(p), max_new_tokens=n, eos_token_id=-1) for p, n in zip(prompts, new, strict=True)]
            found: dict[str, list[int]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=MANY)
                if result is None or result.error is not None:
                    raise RuntimeError(f"continuous batching failed: {result.error if result else 'no result'}")
                if result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
            return [found[name] for name in names]

        return generate

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(start)
