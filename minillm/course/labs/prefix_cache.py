"""Lesson 1.2: traces of requests whose prompts begin alike, and the time to the first token against what was found."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
from matplotlib.figure import Figure

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import precision_name
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.predictions import short
from minillm.course.style import COLOURS, INK, LINES, MARKERS, SMALL, SOFT, figure, titled
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict, prefill_work
from minillm.perf.units import format_time

PROMPT, CHUNK = 512, 128
HITS = (0, 128, 256, 384, 448, 480, 496)

# Traces -----------------------------------------------------------------------------------------------------------------------

SYSTEM = (
    "You are the assistant of a small restaurant. You answer guests politely and in one short sentence. The kitchen is open "
    "from noon to ten in the evening, and closed on Mondays. The soup of the day is pumpkin. All bread is baked in the house. "
    "The menu has three dishes without meat: mushroom risotto, lentil stew and a salad with goat cheese. The fish comes from "
    "the lake nearby. Prices include service. Children eat half portions at half the price. Dogs are welcome on the terrace. "
    "Tables for more than six people must be reserved two days before. The wine list changes every month. If you do not know "
    "an answer, say that you will ask the cook, and never invent a dish."
)
QUESTIONS = ("Is there something without meat?", "Do you bake your own bread?", "Can I bring my dog?")
EXAMPLES = (
    ("The soup was cold and nobody apologised.", "negative"), ("What a lovely evening, we will be back!", "positive"),
    ("The bread alone is worth the trip.", "positive"), ("We waited an hour for the bill.", "negative"),
    ("The risotto was perfect.", "positive"), ("Too loud to talk, and too dear.", "negative"),
)  # fmt: skip
REVIEWS = ("The fish was dry.", "Friendly people, good wine.", "My stew was burnt.")


@dataclass(frozen=True)
class Answer:
    """One request: its prompt's tokens, those found in the cache, and the seconds to the first token."""

    prompt: int
    cached: int
    seconds: float
    text: str
    token_ids: tuple[int, ...]

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


def ask(llm: LLM, prompt: str | Sequence[int], max_tokens: int = 2) -> Answer:
    """Send one request alone and time its first token."""
    ids, engine = llm.engine.encode(prompt), llm.engine
    before = time.perf_counter()
    name = engine.add_request(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    outputs = engine.step()
    while not outputs:  # a prompt above the step's budget comes in chunks
        outputs = engine.step()
    seconds = time.perf_counter() - before
    while engine.knows(name):
        outputs = engine.step() or outputs
    return Answer(len(ids), outputs[0].num_cached_tokens, seconds, outputs[0].text, outputs[0].token_ids)


def _chat(llm: LLM, system: str, user: str) -> list[int]:
    template: Any = llm.tokenizer
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    ids: list[int] = template.apply_chat_template(messages, add_generation_prompt=True)
    return ids


def shared_system(llm: LLM) -> list[Answer]:
    """One long system prompt, one question each."""
    return [ask(llm, _chat(llm, SYSTEM, question)) for question in QUESTIONS]


def few_shot(llm: LLM) -> list[Answer]:
    """The same solved examples before every review."""
    solved = "".join(f"Review: {text}\nMood: {mood}\n\n" for text, mood in EXAMPLES)
    return [ask(llm, f"{solved}Review: {review}\nMood:") for review in REVIEWS]


def conversation(llm: LLM) -> list[Answer]:
    """Turns of one guest: each begins with all tokens that came before it, the model's own answers included."""
    ids = _chat(llm, SYSTEM, QUESTIONS[0])
    answers = [ask(llm, ids, max_tokens=6)]
    for question in QUESTIONS[1:]:
        next_turn = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = [*ids, *answers[-1].token_ids, *llm.engine.encode(next_turn)]
        answers.append(ask(llm, ids, max_tokens=6))
    return answers


def with_the_time(llm: LLM, first: bool) -> list[Answer]:
    """Questions that come with the time of day: as the first words of the system prompt, or after the question."""
    answers = []
    for minute, question in enumerate(QUESTIONS):
        now = f"It is 18:{minute:02d}."
        system, user = (f"{now} {SYSTEM}", question) if first else (SYSTEM, f"{question} {now}")
        answers.append(ask(llm, _chat(llm, system, user), max_tokens=1))
    return answers


def table(traces: Mapping[str, Sequence[Answer]]) -> str:
    """Tokens of every trace, the cold first request counted in; the same on every machine."""
    lines = [f"{'trace':20} {'requests':>8} {'tokens':>7} {'found':>6} {'computed':>9} {'hit rate':>9} {'after the first':>16}"]
    for name, answers in traces.items():
        tokens, found = sum(a.prompt for a in answers), sum(a.cached for a in answers)
        later = answers[1:]
        warm = sum(a.cached for a in later) / sum(a.prompt for a in later)
        lines.append(f"{name:20} {len(answers):8} {tokens:7,} {found:6,} {tokens - found:9,} {found / tokens:9.1%} {warm:16.1%}")
    return "\n".join(lines)


def ttft_figure(traces: Mapping[str, Sequence[Answer]]) -> Figure:
    """Time to the first token of every request against the tokens that it had to compute."""
    fig, ax = figure(7.0, 3.5)
    for i, (name, answers) in enumerate(traces.items()):
        x, y = [a.computed for a in answers], [a.seconds * 1e3 for a in answers]
        ax.plot(x, y, MARKERS[i], color=COLOURS[i], markersize=7, markeredgecolor="white", label=name)
    ax.set_xlim(0)
    ax.set_ylim(0)
    titled(ax, None, "prompt tokens computed (the prompt less what was found)", "time to the first token, ms")
    ax.legend(loc="upper left", fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


# The measurement --------------------------------------------------------------------------------------------------------------


class HitBench:
    """Times the first token of a prompt of which the first tokens are cached. Tokens are random: only their number counts."""

    def __init__(self, model: Transformer, prompt: int = PROMPT, block_size: int = 16) -> None:
        self.prompt, self.block_size = prompt, block_size
        blocks = 4 * -(-(prompt + 1) // block_size)
        self.llm = LLM(
            model, num_blocks=blocks, block_size=block_size, max_num_seqs=1, max_num_batched_tokens=CHUNK, prefix_cache="radix"
        )
        self._random = random.Random(0)

    @property
    def precision(self) -> str:
        return precision_name(self.llm.model.dtype)

    def _tokens(self, n: int) -> list[int]:
        return self._random.choices(range(self.llm.model.config.vocab_size), k=n)

    def measure(self, hit: int, tick: Callable[[float], None] = lambda done: None, repeats: int = 3) -> list[float]:
        """Seconds to the first token, ``repeats`` times, with ``hit`` tokens of the prompt cached (whole blocks)."""
        check_whole("repeats", repeats)
        if hit % self.block_size or not 0 <= hit < self.prompt:
            raise ValueError(f"hit must be whole blocks of {self.block_size} below {self.prompt} tokens, got {hit}")
        shared, seconds = self._tokens(hit), []
        if hit:
            self._first_token(shared + self._tokens(1), partial(tick, 0.0))
        for i in range(repeats):
            ids = shared + self._tokens(self.prompt - hit)
            before = time.perf_counter()
            found = self._first_token(ids, partial(tick, i / repeats))
            seconds.append(time.perf_counter() - before)
            if found != hit:
                raise RuntimeError(f"{found} tokens were found, {hit} were cached")
        return seconds

    def _first_token(self, ids: list[int], tick: Callable[[], None]) -> int:
        """Prefilled in chunks, so that a measurement can be stopped in its middle."""
        engine = self.llm.engine
        name = engine.add_request(ids, SamplingParams(max_tokens=1, ignore_eos=True))
        try:
            while True:
                tick()
                for out in engine.step():
                    return out.num_cached_tokens
        finally:
            engine.abort(name)

    def predict(self, hit: int, hardware: Hardware) -> float:
        """Seconds that the roofline gives the prefill of what is not cached."""
        config, size = self.llm.model.config, self.llm.model.dtype.itemsize
        kwargs: dict[str, Any] = {"dtype": self.precision, "bytes_per_weight": size, "kv_bytes_per_element": size}
        seconds = 0.0
        for start in range(hit, self.prompt, CHUNK):
            n = min(CHUNK, self.prompt - start)
            work = prefill_work(config, n, past=start, logits=int(start + n == self.prompt), **kwargs)
            seconds += predict(work, hardware).seconds
        return seconds


def hit_figure(bench: HitBench, hardware: Hardware, seen: Mapping[int, Sequence[float]], here: int | None = None) -> Figure:
    """Time to the first token against the cached part of the prompt: predicted line, measured points."""
    fig, ax = figure(7.0, 3.6)
    places = range(0, bench.prompt, bench.block_size)
    floors = [bench.predict(hit, hardware) for hit in places]
    ax.plot(places, floors, color=COLOURS[0], linestyle=LINES[0], linewidth=1.6, label="the roofline's floor")
    if seen:
        hits = sorted(seen)
        middle = [statistics.median(seen[h]) for h in hits]
        spread = [[m - min(seen[h]) for h, m in zip(hits, middle)], [max(seen[h]) - m for h, m in zip(hits, middle)]]
        ax.errorbar(
            hits, middle, yerr=spread, fmt=MARKERS[1], color=COLOURS[1], markersize=7, markeredgecolor="white", ecolor=INK,
            elinewidth=1, capsize=3, zorder=5, label="measured",
        )  # fmt: skip
    if here is not None:
        ax.axvline(here, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_ylim(0)
    ax.yaxis.set_major_formatter(lambda v, _: format_time(v).replace(".00 ", " ").replace(".0 ", " ") if v else "0")
    titled(ax, None, f"tokens found in the cache, of a prompt of {bench.prompt}", "time to the first token")
    ax.legend(loc="upper right", fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def hit_panel(bench: HitBench, hardware: Hardware, seen: Mapping[int, Sequence[float]] | None = None, hit: int = 256) -> Panel:
    """A slider for the cached part; every place is measured anew and leaves its point."""
    kept = {h: list(seconds) for h, seconds in (seen or {}).items()}
    places = [h for h in HITS if h < bench.prompt]

    def run(job: Any, cached: int) -> list[float]:
        return bench.measure(cached, job.progress, repeats=2)

    def draw(values: dict[str, Any], found: list[float] | None) -> tuple[Figure, str]:
        hit = values["cached"]
        if found is not None:
            kept[hit] = found
        said = f"{hit} of {bench.prompt} tokens cached: floor {format_time(bench.predict(hit, hardware))}"
        said += f", measured {format_time(statistics.median(found))}." if found else "; measuring …"
        if found and 0 in kept:
            factor = statistics.median(kept[0]) / statistics.median(found)
            tokens = short(bench.prompt / (bench.prompt - hit))
            said += f" The cold prompt takes <b>{short(factor)} times</b> as long and computes {tokens} times the tokens."
        return hit_figure(bench, hardware, kept, here=hit), f"<span class='verdict'>{said}</span>"

    slider = w.SelectionSlider(options=places, value=min(hit, places[-1]), description="cached")
    return Panel("time to the first token by cached tokens", {"cached": slider}, run, draw)
