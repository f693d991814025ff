"""Exercise 3.3: a KV store in 8 bits, a scale that depends on who else is in the step, and keys in 4 bits by channel."""

from minillm.course.tasks.ex_3_3.broken import BREAK
from minillm.course.tasks.ex_3_3.core import CORE
from minillm.course.tasks.ex_3_3.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
