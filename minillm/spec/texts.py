"""Prompts of five kinds, from answers that copy much of what they were given to answers that copy nothing."""

from __future__ import annotations

SETTINGS = """import os
import json

def load_settings(path):
    with open(path) as file:
        settings = json.load(file)
    return settings

def save_settings(path, settings):
    with open(path, "w") as file:
        json.dump(settings, file)

def main():
    path = os.path.join("data", "settings.json")
    settings = load_settings(path)
    settings["color"] = "blue"
    save_settings(path, settings)
"""

ACCOUNT = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            print("Not enough money")
            return self.balance
        self.balance = self.balance - amount
        return self.balance
"""

LETTER = (
    "Dear Sir or Madam, I recieved the bicycle that I ordered from your shop last week. The frame is in good condition, but the "
    "front wheel is bent and the bell is missing. I would like to send the bicycle back and get a new one. Please tell me wich "
    "address I should use and who pays for the transport. I look forward to your answer. Yours faithfully, Thomas Green"
)

NOTICE = (
    "The museum opens every day at ten in the morning and closes at six in the evening. On Thursdays it stays open untill nine. "
    "Children under twelve pay nothing, students pay half of the price. Large bags must be left at the entrance. Photographs are "
    "allowed, but please do not use a flash. The cafe on the second floor serves lunch from noon to three."
)

BRIDGE = (
    "The bridge over the river was closed on Tuesday after an inspection found two cracks in the northern pillar. Engineers said "
    "that the bridge is safe for people on foot, but that cars and trucks must use the tunnel until the pillar has been "
    "repaired. The repair will take about three weeks and will cost two million euros. The city council will discuss on Friday "
    "whether a second bridge should be built further south."
)

PUFFINS = (
    "A team of researchers from the University of Oslo has counted the puffins on the island of Runde for the first time in ten "
    "years. They found that the number of birds has fallen from 120,000 to 75,000. The researchers believe that the birds find "
    "less food because the sea has become warmer and the small fish have moved to the north. They recommend that fishing near "
    "the island should be stopped between May and August, when the birds feed their young."
)

# A model of this size copies on some wordings and goes its own way on others: of twenty wordings of a summary, lookup gave from
# 1.3 to 7.4 tokens a pass. The first three kinds are wordings on which it copies, as large models do on most.
PROMPTS: dict[str, tuple[str, ...]] = {
    "edit code": (
        f"Rewrite this code so that the color is green:\n\n```python\n{SETTINGS}```",
        f"```python\n{ACCOUNT}```\n\nAdd a method print_balance at the end of this class. Give the complete class.",
    ),
    "fix text": (
        f"Correct the spelling mistakes in this letter:\n\n{LETTER}",
        f"Repeat this text and correct its mistakes:\n\n{NOTICE}",
    ),
    "summarise": (
        f"Summarize this text in four sentences. Use the sentences of the text.\n\n{BRIDGE}",
        f"Shorten this text:\n\n{PUFFINS}",
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
