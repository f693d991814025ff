"""Exercise 1.1: the KV store, a causal mask that is right only for prompts, and a decode step for rows of different lengths."""

from minillm.course.tasks.ex_1_1.broken import BREAK
from minillm.course.tasks.ex_1_1.core import CORE
from minillm.course.tasks.ex_1_1.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
