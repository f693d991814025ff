"""The overlap study on a tiny model: what it measures, and that it leaves its engines idle."""

from __future__ import annotations

import torch

from minillm import LLM
from minillm.bench.studies import overlap as study
from minillm.engine.overlap import OneAhead

from ..strategies import tiny_model


def test_a_round_times_every_way_at_every_batch_and_leaves_the_engine_idle() -> None:
    llm = LLM(tiny_model().converted(torch.float32, "cpu"), num_blocks=64, block_size=8, cuda_graphs=True)
    state = study.make_state({"eager": llm.engine}, batches=(1, 3), steps=2)
    pipelines = []
    for turn in range(3):
        found = study.measure(state, turn)
        assert set(found) == {f"eager_{w}_{b}_s" for w in (*study.WAYS, "host") for b in (1, 3)}
        assert all(seconds > 0 for name, seconds in found.items() if "host" not in name)
        assert all(found[f"eager_host_{b}_s"] <= found[f"eager_sync_{b}_s"] for b in (1, 3))
        pipelines.append(type(llm.engine.pipeline))
    assert not llm.engine.has_work and llm.engine.cache.pool.num_referenced == 0
    assert OneAhead in pipelines, "the last way of a round rotates"
    assert not any("run" in vars(p) for p in (llm.engine.runner.eager, state.graphs["eager"])), "clocks are taken off"


def test_bars_compare_with_a_step_at_a_time() -> None:
    numbers = {f"{mode}_{way}_{b}_s": {"sync": 2.0, "overlap": 1.0, "replay": 3.0, "host": 0.5}[way]
               for mode in ("eager", "compiled") for way in (*study.WAYS, "host") for b in study.BATCHES}  # fmt: skip
    values = {bar.name: bar.value(numbers) for bar in study.BARS}
    assert len(values) == 18 and set(values.values()) == {0.5, 1.5, 0.25}
    limited = [bar.name for bar in study.BARS if bar.at_most is not None]
    assert len(limited) == 6 and all("overlapped" in name for name in limited)
