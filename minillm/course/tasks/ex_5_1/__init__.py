"""Exercise 5.1: a continuous batching policy, a request whose phase is guessed, and the steps of a thousand requests."""

from minillm.course.tasks.ex_5_1.broken import BREAK
from minillm.course.tasks.ex_5_1.core import CORE
from minillm.course.tasks.ex_5_1.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
