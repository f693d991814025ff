"""Plausible wrong answers to exercise 5.2, each with the check at which it must be red."""


def fair(running, waiting, budget, limit, decodes_first=True):
    grants = [0] * len(running)
    groups = (lambda n: n == 1, lambda n: n > 1) if decodes_first else (lambda n: True,)
    for group in groups:
        for i, n in enumerate(running):
            if group(n):
                grants[i] = min(n, budget)
                budget -= grants[i]
    waiting = iter(waiting)
    while budget and len(grants) < limit:
        n = next(waiting, None)
        if n is None:
            break
        grants.append(min(n, budget))
        budget -= grants[-1]
    return grants


class NothingForThoseWhoSitOut:
    def grants(self, running, waiting, budget, limit):
        return [n for n in fair(running, waiting, budget, limit) if n > 1]


class OldestFirst:
    def grants(self, running, waiting, budget, limit):
        return fair(running, waiting, budget, limit, decodes_first=False)


class PromptsFirst:
    def grants(self, running, waiting, budget, limit):
        turned = fair([2 if n == 1 else n for n in running], (), budget, limit)
        given = [min(n, g) for n, g in zip(running, turned)]
        given = [0 if n == 1 and budget < sum(running) else g for n, g in zip(running, given)]
        return given + fair((), waiting, budget - sum(given), limit - len(running))


class DecodesForFree:
    def grants(self, running, waiting, budget, limit):
        prompts = fair([n if n > 1 else 0 for n in running], waiting, budget, limit)
        return [1 if n == 1 else g for n, g in zip(running, prompts)] + prompts[len(running) :]


class EqualShares:
    def grants(self, running, waiting, budget, limit):
        each = max(1, budget // max(1, len(running) + 1))
        grants = [min(n, each, budget - i) for i, n in enumerate(running)]
        return grants + fair((), waiting, max(0, budget - sum(grants)), limit - len(running))


class GoesBelowZero:
    def grants(self, running, waiting, budget, limit):
        if budget < sum(n == 1 for n in running):
            return [1 if n == 1 else 0 for n in running]
        return fair(running, waiting, budget, limit)


class ForgetsTheLimit:
    def grants(self, running, waiting, budget, limit):
        return fair(running, waiting, budget, 10**6)


class Remembers:
    left = None

    def grants(self, running, waiting, budget, limit):
        if self.left is not None:
            return self.left
        self.left = fair(running, waiting, budget, limit)
        self.left[-1:] = [0] if len(self.left) > len(running) else self.left[-1:]
        answer = fair(running, waiting, budget, limit) if not hasattr(self, "asked") else self.left
        self.asked = True
        return answer


class ReadsTheWholeQueue:
    def grants(self, running, waiting, budget, limit):
        return fair(running, list(waiting), budget, limit)


def places_of(granted, left, place, samples):
    places, end = [], 0
    for n, wanted in zip(granted, left):
        end += n
        places.append(place(n, wanted, end) if samples(n, wanted) else None)
    return places


def only_who_samples(granted, left):
    places = places_of(granted, left, lambda n, wanted, end: end - 1, lambda n, wanted: n == wanted)
    return [place for place in places if place is not None][:1]


def requests_not_tokens(granted, left):
    return [row if n == wanted else None for row, (n, wanted) in enumerate(zip(granted, left))]


def its_first_token(granted, left):
    return places_of(granted, left, lambda n, wanted, end: end - n, lambda n, wanted: n == wanted)


def behind_its_last_token(granted, left):
    return places_of(granted, left, lambda n, wanted, end: end, lambda n, wanted: n == wanted)


def only_who_decodes(granted, left):
    return places_of(granted, left, lambda n, wanted, end: end - 1, lambda n, wanted: n == 1)


def who_takes_part(granted, left):
    return places_of(granted, left, lambda n, wanted, end: end - 1, lambda n, wanted: n > 0)


def a_prompt_never(granted, left):
    return places_of(granted, left, lambda n, wanted, end: end - 1, lambda n, wanted: n == wanted and wanted <= 8)


def eats_the_list(granted, left):
    answer = places_of(granted, left, lambda n, wanted, end: end - 1, lambda n, wanted: n == wanted)
    if isinstance(granted, list):
        granted.clear()
    return answer


def halved(price, prompt):
    low, high = 0, prompt
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if price(middle) else (low, middle - 1)
    return low


def a_share(seconds, decodes, prompt, itl):
    return prompt / 2


def first_piece(seconds, decodes, prompt, itl):
    return halved(lambda c: seconds(decodes, c, 0) <= itl, prompt)


def without_the_decodes(seconds, decodes, prompt, itl):
    return halved(lambda c: seconds(0, c, prompt - c) <= itl, prompt)


def strictly_below(seconds, decodes, prompt, itl):
    return halved(lambda c: seconds(decodes, c, prompt - c) < itl, prompt)


def powers_of_two(seconds, decodes, prompt, itl):
    c = 1
    while 2 * c <= prompt and seconds(decodes, 2 * c, prompt - 2 * c) <= itl:
        c *= 2
    return c


def at_least_one(seconds, decodes, prompt, itl):
    return max(1, halved(lambda c: seconds(decodes, c, prompt - c) <= itl, prompt))


def one_by_one(seconds, decodes, prompt, itl):
    c = 0
    while c < prompt and seconds(decodes, c + 1, prompt - c - 1) <= itl:
        c += 1
    return c


BY_HAND = "exact: three decode and a prompt waits; a prompt that is older than who decodes"
MIXED = "exact: three decode; a piece of a prompt between them; its end"
WRONG = {
    "5.2 core": [
        (NothingForThoseWhoSitOut, "shape"),
        (OldestFirst, BY_HAND),
        (PromptsFirst, BY_HAND),
        (DecodesForFree, BY_HAND),
        (EqualShares, BY_HAND),
        (ReadsTheWholeQueue, "budget: the queue is not searched"),
        (Remembers, "state: inputs unchanged, nothing remembered"),
    ],
    "5.2 break": [
        (only_who_samples, "shape"),
        (requests_not_tokens, MIXED),
        (its_first_token, MIXED),
        (behind_its_last_token, MIXED),
        (only_who_decodes, MIXED),
        (who_takes_part, MIXED),
        (a_prompt_never, "random: pieces of all lengths"),
        (eats_the_list, "state: inputs unchanged"),
    ],
    "5.2 stretch": [
        (a_share, "shape"),
        (without_the_decodes, "exact: a price by hand"),
        (powers_of_two, "exact: a price by hand"),
        (strictly_below, "exact: a price by hand"),
        (first_piece, "random: against trying every chunk"),
        (at_least_one, "random: against trying every chunk"),
        (one_by_one, "budget: prices asked"),
    ],
}
