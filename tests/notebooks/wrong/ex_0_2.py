"""Plausible wrong answers to exercise 0.2, each with the check at which it must be red."""

import math


def kv(config, element_bytes, two=2, default_heads=True, default_dim=True):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") if default_heads else config["num_key_value_heads"]
    head_dim = config.get("head_dim") if default_dim else config["head_dim"]
    kv_heads, head_dim = kv_heads or heads, head_dim or config["hidden_size"] // heads
    return two * config["num_hidden_layers"] * kv_heads * head_dim * element_bytes


def room(per_token, weight_bytes, memory, context, usable):
    return per_token, max(0, math.floor((usable * memory - weight_bytes) / (context * per_token)))


def only_the_requests(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv(config, element_bytes), weight_bytes, memory, context, usable)[1]


def not_a_whole_number(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    per_token = kv(config, element_bytes)
    return per_token, (usable * memory - weight_bytes) / (context * per_token)


def keys_only(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv(config, element_bytes, two=1), weight_bytes, memory, context, usable)


def query_heads(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    per_token = kv({**config, "num_key_value_heads": None}, element_bytes)
    return room(per_token, weight_bytes, memory, context, usable)


def usable_share_of_the_rest(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    per_token = kv(config, element_bytes)
    return per_token, max(0, math.floor(usable * (memory - weight_bytes) / (context * per_token)))


def everything_usable(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv(config, element_bytes), weight_bytes, memory, context, 1.0)


def head_dim_from_the_width(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv({**config, "head_dim": None}, element_bytes), weight_bytes, memory, context, usable)


def two_bytes_always(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv(config, 2), weight_bytes, memory, context, usable)


def rounded_to_the_nearest(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    per_token = kv(config, element_bytes)
    return per_token, max(0, round((usable * memory - weight_bytes) / (context * per_token)))


def kv_heads_required(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv(config, element_bytes, default_heads=False), weight_bytes, memory, context, usable)


def head_dim_required(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    return room(kv(config, element_bytes, default_dim=False), weight_bytes, memory, context, usable)


def fewer_than_none(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    per_token = kv(config, element_bytes)
    return per_token, math.floor((usable * memory - weight_bytes) / (context * per_token))


def one_is_kept_free(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    per_token = kv(config, element_bytes)
    return per_token, max(0, math.ceil((usable * memory - weight_bytes) / (context * per_token)) - 1)


def defaults_written_into_the_config(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    return room(kv(config, element_bytes), weight_bytes, memory, context, usable)


def head_dim_taken_out_of_the_config(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
    result = room(kv(config, element_bytes), weight_bytes, memory, context, usable)
    config.pop("head_dim", None)
    return result


def right_but_writes_into_the_config(config, parameters, memory_mib, context):
    result = room(kv(config, 2), 2 * parameters, memory_mib * 2**20, context, 0.9)[1]
    config["num_key_value_heads"] = 1
    return max(0, result)


def megabytes(config, parameters, memory_mib, context):
    return room(kv(config, 2), 2 * parameters, memory_mib * 10**6, context, 0.9)[1]


def kibibytes_of_a_thousand(config, parameters, memory_mib, context):
    return room(kv(config, 2), 2 * parameters, memory_mib * 1000 * 1024, context, 0.9)[1]


def mended_by_halving_the_kv(config, parameters, memory_mib, context):
    return room(kv(config, 2, two=1), 2 * parameters, memory_mib * 10**6, context, 0.9)[1]


def mended_by_filling_everything(config, parameters, memory_mib, context):
    return room(kv(config, 2), 2 * parameters, memory_mib * 10**6, context, 0.9 * 1.05)[1]


def negative_room(config, parameters, memory_mib, context):
    per_token = kv(config, 2)
    return math.floor((0.9 * memory_mib * 2**20 - 2 * parameters) / (context * per_token))


def request(prefill, token, prompt, answer):
    """Seconds, and the smallest prompt, of a request whose phases are priced by two functions."""
    even = 1
    while prefill(even) < answer * token(even + answer - 1):
        even += 1
    return prefill(prompt) + answer * token(prompt + answer - 1), even


def a_pass(weights, pair, kv_bytes, past, new, peak, bandwidth, both=max, pairs=None, writes=True):
    seen = new * past + new * (new + 1) // 2 if pairs is None else pairs(past, new)
    flops = 2 * weights * new + pair * seen
    moved = 2 * weights + kv_bytes * (past + new) + (kv_bytes * new if writes else 0)
    return both(flops / peak, moved / bandwidth)


def variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth, **changes):
    def price(past, new):
        return a_pass(weights, pair, kv_bytes, past, new, peak, bandwidth, **changes)

    return request(lambda n: price(0, n), lambda past: price(past, 1), prompt, answer)


def seconds_alone(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    return variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth)[0]


def both_clocks_added(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    return variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth, both=lambda a, b: a + b)


def no_causal_mask(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    return variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth, pairs=lambda past, new: new * (past + new))


def arithmetic_only(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    return variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth, both=lambda a, b: a)


def the_write_forgotten(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    return variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth, writes=False)


def one_token_too_many(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    seconds, even = variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth)
    return seconds, even + 1


def the_answer_at_the_prompts_end(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    def price(past, new):
        return a_pass(weights, pair, kv_bytes, past, new, peak, bandwidth)

    return request(lambda n: price(0, n), lambda past: price(past - answer + 1, 1), prompt, answer)


def an_answer_of_one_is_free(weights, pair, kv_bytes, prompt, answer, peak, bandwidth):
    seconds, even = variant(weights, pair, kv_bytes, prompt, answer, peak, bandwidth)
    return seconds, even if answer > 1 else 1


WRONG = {
    "0.2 core": [
        (only_the_requests, "shape"),
        (not_a_whole_number, "shape"),
        (keys_only, "exact: two layers, two KV heads"),
        (query_heads, "exact: two layers, two KV heads"),
        (usable_share_of_the_rest, "exact: two layers, two KV heads"),
        (everything_usable, "exact: two layers, two KV heads"),
        (head_dim_from_the_width, "exact: Qwen3-32B on one and two H100"),
        (two_bytes_always, "random: against a planner"),
        (rounded_to_the_nearest, "random: against a planner"),
        (kv_heads_required, "edges: no num_key_value_heads"),
        (head_dim_required, "edges: no head_dim"),
        (fewer_than_none, "edges: the weights do not fit"),
        (one_is_kept_free, "edges: the last request fits exactly"),
        (defaults_written_into_the_config, "state: config unchanged"),
        (head_dim_taken_out_of_the_config, "state: config unchanged"),
    ],
    "0.2 break": [
        (megabytes, "exact: a card of 1 MiB"),
        (mended_by_halving_the_kv, "exact: a card of 1 MiB"),
        (kibibytes_of_a_thousand, "exact: a card of 1 MiB"),
        (mended_by_filling_everything, "random: against a planner"),
        (right_but_writes_into_the_config, "random: against a planner"),
        (negative_room, "edges: the weights do not fit"),
    ],
    "0.2 stretch": [
        (seconds_alone, "shape"),
        (both_clocks_added, "exact: the seconds of a request by hand"),
        (no_causal_mask, "exact: the seconds of a request by hand"),
        (the_answer_at_the_prompts_end, "exact: the seconds of a request by hand"),
        (one_token_too_many, "exact: the prompt length by hand"),
        (arithmetic_only, "random: against trying every length"),
        (the_write_forgotten, "random: against trying every length"),
        (an_answer_of_one_is_free, "edges: an answer of one token"),
    ],
}
