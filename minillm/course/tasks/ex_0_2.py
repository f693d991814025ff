"""Exercise 0.2: KV per token, concurrency, and the time of one request, on paper."""

from __future__ import annotations

import math
import random
from typing import Any, Callable, Mapping

from minillm.course.expect import Mismatch, expect_equal, is_whole, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.model.config import ModelConfig
from minillm.model.presets import preset
from minillm.perf import plan as planning
from minillm.perf.roofline import capacity, decode_work, predict, prefill_work, step_work

TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
QWEN = {"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
QWEN_WEIGHTS = 2 * preset("qwen3-32b").num_params
LLAMA_7B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}


def kv_of(config: Mapping[str, Any], element_bytes: float) -> float:
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = config["hidden_size"] // heads if head_dim is None else head_dim
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * element_bytes


def oracle(
    config: Mapping[str, Any], weight_bytes: float, memory: float, context: int, element_bytes: float = 2, usable: float = 0.9
) -> tuple[float, int]:
    per_token = kv_of(config, element_bytes)
    return per_token, max(0, math.floor((usable * memory - weight_bytes) / (context * per_token)))


def config_draw(rng: random.Random) -> dict[str, Any]:
    kv_heads = rng.choice((1, 2, 4, 8))
    config = {
        "num_hidden_layers": rng.randint(1, 80), "num_attention_heads": kv_heads * rng.choice((1, 2, 5, 8)),
        "num_key_value_heads": kv_heads, "head_dim": rng.choice((48, 64, 80, 128)),
    }  # fmt: skip
    config["hidden_size"] = config["num_attention_heads"] * rng.choice((64, 80))
    return config


def draws(n: int = 40) -> list[tuple[Any, ...]]:
    """Arguments of ``plan``. The weights fit always; what is left holds anything from no request to thousands."""
    rng = random.Random(2)
    made = []
    for _ in range(n):
        config, weight_bytes = config_draw(rng), rng.randint(10**9, 10**11)
        memory, context = round(weight_bytes * rng.uniform(1.5, 4)), rng.randint(1, 30_000)
        made.append((config, weight_bytes, memory, context, rng.choice((0.5, 1, 2, 4)), rng.choice((0.8, 0.9, 0.95))))
    return made


def _compare(f: Callable[..., Any], args: tuple[Any, ...], expected: tuple[float, int], note: str = "") -> None:
    answer = f(dict(args[0]), *args[1:])  # an answer that writes into its config must not reach the next check
    given = f"plan({', '.join(map(str, args[1:]))}) for {args[0]}{note}"
    if not isinstance(answer, tuple) or len(answer) != 2:
        expect_equal(answer, expected, what=given)
    expect_equal(answer[0], expected[0], rtol=1e-12, what=f"KV bytes per token of {args[0]}, {args[4]} bytes an element")
    expect_equal(answer[1], expected[1], what=f"{given}, requests")


def core_shape(f: Callable[..., Any]) -> None:
    answer = f(dict(TINY), 2000, 10_000, 10, 2, 0.5)
    whole = isinstance(answer, tuple) and len(answer) == 2 and is_whole(answer[1])
    if not whole or isinstance(answer[0], (str, bool)):
        raise Mismatch(f"got {answer!r}, expected a tuple (bytes, whole number of requests) such as (128, 2)")


def core_exact(f: Callable[..., Any]) -> None:
    # 2·2 layers·2 heads·8 numbers·2 bytes = 128; 0.5·10,000 − 2,000 = 3,000 bytes hold two requests of 1,280
    _compare(f, (TINY, 2000, 10_000, 10, 2, 0.5), (128, 2))


def core_qwen(f: Callable[..., Any]) -> None:
    for memory, requests in ((80e9, 6), (160e9, 73)):
        _compare(f, (QWEN, QWEN_WEIGHTS, memory, 4096, 2, 0.9), (262_144, requests))


def core_random(f: Callable[..., Any]) -> None:
    for args in draws():
        _compare(f, args, oracle(*args))


def core_mha(f: Callable[..., Any]) -> None:
    # every query head has keys and values of its own
    for config in ({**LLAMA_7B, "head_dim": 128}, {**LLAMA_7B, "head_dim": 128, "num_key_value_heads": None}):
        _compare(f, (config, 13.5e9, 80e9, 4096, 2, 0.9), (524_288, 27))


def core_head_dim(f: Callable[..., Any]) -> None:
    for config in ({**LLAMA_7B, "num_key_value_heads": 32}, {**LLAMA_7B, "num_key_value_heads": 32, "head_dim": None}):
        _compare(f, (config, 13.5e9, 80e9, 4096, 2, 0.9), (524_288, 27))


def core_too_large(f: Callable[..., Any]) -> None:
    _compare(f, (TINY, 20_000, 10_000, 10, 2, 0.5), (128, 0), ": the weights alone do not fit")


def core_full(f: Callable[..., Any]) -> None:
    _compare(f, (TINY, 1160, 10_000, 10, 2, 0.5), (128, 3), ": 5,000 − 1,160 bytes are exactly three requests of 1,280")


def core_state(f: Callable[..., Any]) -> None:
    for shape in (LLAMA_7B, QWEN):  # with and without the two keys that may be missing
        config = dict(shape)
        with unchanged(config=config):
            f(config, 13.5e9, 80e9, 4096, 2, 0.9)


def requests_of(config: Mapping[str, Any], parameters: int, memory_mib: int, context: int) -> int:
    return oracle(config, 2 * parameters, memory_mib * 2**20, context)[1]


def break_exact(f: Callable[..., Any]) -> None:
    # 0.9·1,048,576 − 200,000 = 743,718 bytes; a request of 100 tokens holds 12,800
    expect_equal(f(dict(TINY), 100_000, 1, 100), 58, what=f"requests({TINY}, 100000, 1, 100), a card of 1 MiB")


def break_qwen(f: Callable[..., Any]) -> None:
    expect_equal(f(dict(QWEN), QWEN_WEIGHTS // 2, 81_559, 4096), 10, what="Qwen3-32B on a card that reports 81,559 MiB")


def break_random(f: Callable[..., Any]) -> None:
    for config, weight_bytes, memory, context, *_ in draws():
        rest = (weight_bytes // 2, memory // 10**6, context)
        handed = dict(config)
        with unchanged(config=handed):
            answer = f(handed, *rest)
        expect_equal(answer, requests_of(config, *rest), what=f"requests{(config, *rest)}")


def break_edges(f: Callable[..., Any]) -> None:
    what = "Qwen3-32B on a card of 24,576 MiB: its weights do not fit"
    expect_equal(f(dict(QWEN), QWEN_WEIGHTS // 2, 24_576, 4096), 0, what=what)


def seconds_of(weights: int, pair: int, kv: int, past: int, new: int, peak: float, bandwidth: float) -> float:
    """One pass over ``new`` tokens that follow ``past`` tokens."""
    flops = 2 * weights * new + pair * (new * past + new * (new + 1) // 2)
    moved = 2 * weights + kv * (past + new) + kv * new
    return max(flops / peak, moved / bandwidth)


def request_of(weights: int, pair: int, kv: int, prompt: int, answer: int, peak: float, bandwidth: float) -> tuple[float, int]:
    """(seconds of the request, smallest prompt whose prefill takes at least as long as the whole answer), by trying them all."""

    def phases(n: int) -> tuple[float, float]:
        return (
            seconds_of(weights, pair, kv, 0, n, peak, bandwidth),
            answer * seconds_of(weights, pair, kv, n + answer - 1, 1, peak, bandwidth),
        )

    even = 1
    while phases(even)[0] < phases(even)[1]:
        even += 1
    return sum(phases(prompt)), even


def request_draws(n: int = 20) -> list[tuple[Any, ...]]:
    """Large weights, so that one more prompt token always costs more in prefill than in all of decode."""
    rng = random.Random(3)
    made = []
    for _ in range(n):
        peak = rng.uniform(1e12, 1e14)
        made.append(
            (rng.randint(10**8, 10**9), rng.randint(10**3, 10**5), rng.randint(10**3, 2 * 10**4), rng.randint(1, 2000),
             rng.randint(2, 12), peak, peak / rng.uniform(5, 100))
        )  # fmt: skip
    return made


def _compare_request(f: Callable[..., Any], args: tuple[Any, ...], part: int | None = None) -> None:
    answer, expected, given = f(*args), request_of(*args), f"request_time{args}"
    if not isinstance(answer, tuple) or len(answer) != 2:
        expect_equal(answer, expected, what=given)
    if part in (None, 0):
        expect_equal(answer[0], expected[0], rtol=1e-9, what=f"{given}, seconds")
    if part in (None, 1):
        expect_equal(answer[1], expected[1], what=f"{given}, prompt length")


HAND = (4, 2, 1, 2, 2, 8.0, 8.0)


def stretch_shape(f: Callable[..., Any]) -> None:
    answer = f(*HAND)
    if not isinstance(answer, tuple) or len(answer) != 2 or not is_whole(answer[1]):
        raise Mismatch(f"got {answer!r}, expected a tuple (seconds, whole number of tokens) such as (6.75, 3)")


def stretch_seconds(f: Callable[..., Any]) -> None:
    # prefill: 2·4·2 + 2·3 = 22 FLOP, 2.75 s. A token: past 3, so 8 + 2·4 = 16 FLOP, 2 s; two of them 4 s
    _compare_request(f, HAND, 0)


def stretch_even(f: Callable[..., Any]) -> None:
    # a prompt of 3: 24 + 2·6 = 36 FLOP, 4.5 s, and two tokens at past 4: 18 FLOP, 2.25 s each
    _compare_request(f, HAND, 1)


def stretch_random(f: Callable[..., Any]) -> None:
    for args in request_draws():
        _compare_request(f, args)


def stretch_short(f: Callable[..., Any]) -> None:
    # one prompt token: both phases wait for the weights
    _compare_request(f, (10**9, 10**4, 10**4, 1, 4, 1e14, 1e12), 0)


def stretch_one(f: Callable[..., Any]) -> None:
    # past 1: a token of the answer reads one KV more than a prompt of one token, so a prompt of one is not enough
    _compare_request(f, (10**8, 10**3, 10**4, 1, 1, 1e13, 1e12))


TASKS = (
    Task(
        "0.2 core", "Size the KV cache and the concurrency",
        (
            NamedCheck("shape", core_shape, 2),
            NamedCheck("exact: two layers, two KV heads", core_exact, 1),
            NamedCheck("exact: Qwen3-32B on one and two H100", core_qwen, 2),
            NamedCheck("random: against a planner", core_random, 3),
            NamedCheck("edges: no num_key_value_heads", core_mha, 3),
            NamedCheck("edges: no head_dim", core_head_dim, 3),
            NamedCheck("edges: the weights do not fit", core_too_large, 1),
            NamedCheck("edges: the last request fits exactly", core_full, 1),
            NamedCheck("state: config unchanged", core_state, 3),
        ),
        (
            "What does one token leave behind for later tokens, in every layer? And whose memory is it, after the weights have "
            "taken theirs from the usable share?",
            "K and V: two vectors of kv_heads · head_dim numbers in each of num_hidden_layers layers. Free bytes: usable · "
            "memory − weight_bytes; one request holds context · KV per token.",
            "kv_heads = config.get('num_key_value_heads'), and if that is None …; head_dim likewise from hidden_size and heads; "
            "return per_token, max(0, math.floor(free / (…)))",
        ),
        references=(oracle, kv_of, planning.plan, capacity, ModelConfig.kv_bytes_per_token, ModelConfig.from_hf),
    ),
    Task(
        "0.2 break", "The planner that lost four gigabytes",
        (
            NamedCheck("exact: a card of 1 MiB", break_exact, 1),
            NamedCheck("exact: a card of 81,559 MiB", break_qwen, 2),
            NamedCheck("random: against a planner", break_random, 2),
            NamedCheck("edges: the weights do not fit", break_edges, 3),
        ),
        (
            "Follow the units through the function: which of its numbers are in bytes, and how did each get there?",
            "parameters · 2 bytes; KV per token in bytes; memory_mib is a count of MiB, and a MiB has 2²⁰ bytes.",
            "memory = memory_mib * 2**20; the rest may stay",
        ),
        references=(requests_of, oracle, kv_of, planning.plan, capacity),
    ),
    Task(
        "0.2 stretch", "The time of a request, and the prompt that takes as long as its answer",
        (
            NamedCheck("shape", stretch_shape, 2),
            NamedCheck("exact: the seconds of a request by hand", stretch_seconds, 1),
            NamedCheck("exact: the prompt length by hand", stretch_even, 3),
            NamedCheck("random: against trying every length", stretch_random, 2),
            NamedCheck("edges: a prompt of one token", stretch_short, 1),
            NamedCheck("edges: an answer of one token", stretch_one, 3),
        ),
        (
            "Write one function for a pass over `new` tokens that follow `past` tokens. Prefill is one such pass, an answer "
            "token another; each is bound by the slower of its two clocks.",
            "pairs = new · past + new · (new + 1) / 2. FLOPs: 2 · weights · new + pair_flops · pairs. Bytes: 2 · weights + "
            "kv_bytes · (past + new) read + kv_bytes · new written.",
            "ttft = a_pass(0, prompt); tpot = a_pass(prompt + answer − 1, 1); n = 1; while prefill of n < answer · "
            "token after n: n += 1",
        ),
        references=(request_of, seconds_of, predict, step_work, prefill_work, decode_work),
    ),
)  # fmt: skip
