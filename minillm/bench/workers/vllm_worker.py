"""vLLM's CPU build, through vllm.LLM.generate in bfloat16."""

from __future__ import annotations

import os
from typing import Any

from protocol import Handler, Prompts, serve, timed, versions  # type: ignore[import-not-found]  # run as a script: its folder is the path


def start(task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Handler]]:
    cores = sorted(os.sched_getaffinity(0))[: task["threads"]]
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
    )  # fmt: skip
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        task["folder"], dtype=task["options"]["dtype"], enforce_eager=task["options"]["eager"], max_model_len=1024,
        max_num_seqs=32, max_num_batched_tokens=2048, enable_prefix_caching=False, seed=0,
    )  # fmt: skip

    def generate(prompts: Prompts, new: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in new]
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    how = "eager" if task["options"]["eager"] else "compiled as it chooses"
    facts = {
        "versions": versions("vllm", "vllm-cpu", "torch", "transformers", "numpy"), "dtype": task["options"]["dtype"],
        "engine": f"vllm.LLM, {how}, prefix caching off",
    }  # fmt: skip
    return facts, timed(generate)


if __name__ == "__main__":
    serve(start)
