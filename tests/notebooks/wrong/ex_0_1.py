"""Plausible wrong answers to exercise 0.1, each with the check at which it must be red."""

import math


def one_operation_per_weight(rows, n_in, n_out, element_bytes, peak, bandwidth):
    compute, move = rows * n_in * n_out / peak, element_bytes * (n_in * n_out + rows * (n_in + n_out)) / bandwidth
    return max(compute, move), "compute" if compute > move else "bandwidth"


def both_times_added(rows, n_in, n_out, element_bytes, peak, bandwidth):
    compute, move = 2 * rows * n_in * n_out / peak, element_bytes * (n_in * n_out + rows * (n_in + n_out)) / bandwidth
    return compute + move, "compute" if compute > move else "bandwidth"


def activations_forgotten(rows, n_in, n_out, element_bytes, peak, bandwidth):
    compute, move = 2 * rows * n_in * n_out / peak, element_bytes * n_in * n_out / bandwidth
    return max(compute, move), "compute" if compute > move else "bandwidth"


def always_sixteen_bits(rows, n_in, n_out, element_bytes, peak, bandwidth):
    compute, move = 2 * rows * n_in * n_out / peak, 2 * (n_in * n_out + rows * (n_in + n_out)) / bandwidth
    return max(compute, move), "compute" if compute > move else "bandwidth"


def a_tie_is_compute(rows, n_in, n_out, element_bytes, peak, bandwidth):
    compute, move = 2 * rows * n_in * n_out / peak, element_bytes * (n_in * n_out + rows * (n_in + n_out)) / bandwidth
    return max(compute, move), "compute" if compute >= move else "bandwidth"


def only_the_time(rows, n_in, n_out, element_bytes, peak, bandwidth):
    return max(2 * rows * n_in * n_out / peak, element_bytes * (n_in * n_out + rows * (n_in + n_out)) / bandwidth)


def weight_per_row(rows, n_in, n_out, element_bytes):
    return element_bytes * rows * (n_in * n_out + n_in + n_out)


def result_not_written(rows, n_in, n_out, element_bytes):
    return element_bytes * (n_in * n_out + rows * n_in)


def no_rows_nothing_read(rows, n_in, n_out, element_bytes):
    return element_bytes * (n_in * n_out + rows * (n_in + n_out)) if rows else 0


def two_bytes_always(rows, n_in, n_out, element_bytes):
    return 2 * (n_in * n_out + rows * (n_in + n_out))


def the_ridge_itself(n_in, n_out, element_bytes, peak, bandwidth):
    return math.ceil(element_bytes / 2 * peak / bandwidth)


def the_tie_counts(n_in, n_out, element_bytes, peak, bandwidth):
    slope = 2 * n_in * n_out / peak - element_bytes * (n_in + n_out) / bandwidth
    return None if slope <= 0 else max(1, math.ceil(element_bytes * n_in * n_out / bandwidth / slope))


def never_none(n_in, n_out, element_bytes, peak, bandwidth):
    slope = abs(2 * n_in * n_out / peak - element_bytes * (n_in + n_out) / bandwidth)
    return math.floor(element_bytes * n_in * n_out / bandwidth / slope) + 1


def a_float(n_in, n_out, element_bytes, peak, bandwidth):
    slope = 2 * n_in * n_out / peak - element_bytes * (n_in + n_out) / bandwidth
    return None if slope <= 0 else element_bytes * n_in * n_out / bandwidth / slope


WRONG = {
    "0.1 core": [
        (only_the_time, "shape"),
        (one_operation_per_weight, "exact: a layer of 2 × 3"),
        (both_times_added, "exact: a layer of 2 × 3"),
        (activations_forgotten, "exact: a layer of 2 × 3"),
        (always_sixteen_bits, "random: against the engine's roofline"),
        (a_tie_is_compute, "edges: both limits equal"),
    ],
    "0.1 break": [
        (weight_per_row, "exact: two rows"),
        (result_not_written, "exact: one row"),
        (two_bytes_always, "random: against the engine's count"),
        (no_rows_nothing_read, "edges: no rows"),
    ],
    "0.1 stretch": [
        (a_float, "shape"),
        (the_ridge_itself, "exact: a layer of 2 × 4"),
        (the_tie_counts, "exact: a layer of 2 × 4"),
        (never_none, "random: against a search"),
    ],
}
