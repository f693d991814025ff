"""Prompts of five kinds, from answers that copy much of what they were given to answers that copy nothing."""

from __future__ import annotations

CODE = '''def total_price(items, tax):
    total = 0
    for item in items:
        price = item["price"]
        amount = item["amount"]
        total = total + price * amount
    total = total + total * tax
    return total


def print_bill(items, tax):
    for item in items:
        print(item["name"], item["amount"], item["price"])
    print("total", total_price(items, tax))
'''

LETTER = (
    "the meeting of the garden club will take place on monday at seven in the old school house . please bring your own seeds and "
    "a small pot . mrs miller will show how tomatoes are planted , and mr brown will talk about the new water pump . after the "
    "meeting there is tea and cake in the kitchen . members who cannot come are asked to write to the secretary before friday ."
)

REPORT = (
    "The bridge over the river was closed on Tuesday after an inspection found two cracks in the northern pillar. Engineers said "
    "that the bridge is safe for people on foot, but that cars and trucks must use the tunnel until the pillar has been "
    "repaired. The repair will take about three weeks and will cost two million euros. The city council will discuss on Friday "
    "whether a second bridge should be built further south."
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "edit code": (
        f"Rename the variable total to bill in this code and answer with the whole code:\n\n```python\n{CODE}```",
        f"Add a docstring to each function of this code and answer with the whole code:\n\n```python\n{CODE}```",
    ),
    "fix text": (
        f"Correct the capital letters and the spaces in this text and answer with the whole text:\n\n{LETTER}",
        f"Repeat this text word for word, with correct punctuation:\n\n{LETTER}",
    ),
    "summarise": (
        f"Summarise this report, keeping its words where you can:\n\n{REPORT}",
        f"List the facts of this report, sentence by sentence:\n\n{REPORT}",
    ),
    "chat": (
        "What should I look at when I buy a used bicycle?",
        "Why do cats sleep so much?",
    ),
    "story": (
        "Write a story about a lighthouse keeper who finds a message in a bottle.",
        "Write a story about two children who build a boat.",
    ),
}  # fmt: skip
COPYING = ("edit code", "fix text", "summarise")
"""The kinds whose answers repeat much of their prompts."""
