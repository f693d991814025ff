"""Prompts and the size of a block, for the tasks of exercise 4.1."""

from __future__ import annotations

B = 4
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0, 3], [5] * 12, [4, 4, 4])
