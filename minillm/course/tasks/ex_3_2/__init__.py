"""Exercise 3.2: a linear layer in 4 bits, the sign of a packed word, and the search for AWQ's scales."""

from minillm.course.tasks.ex_3_2.broken import BREAK
from minillm.course.tasks.ex_3_2.core import CORE
from minillm.course.tasks.ex_3_2.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
