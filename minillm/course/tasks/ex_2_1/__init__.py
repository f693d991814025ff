"""Exercise 2.1: a linear layer in 8-bit arithmetic, a scale that couples tokens, and e4m3 numbers by hand."""

from minillm.course.tasks.ex_2_1.broken import BREAK
from minillm.course.tasks.ex_2_1.core import CORE
from minillm.course.tasks.ex_2_1.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
