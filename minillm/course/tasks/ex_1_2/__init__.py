"""Exercise 1.2: a prefix cache of one's own, names of blocks that forget what came before, and the order of eviction."""

from minillm.course.tasks.ex_1_2.broken import BREAK
from minillm.course.tasks.ex_1_2.core import CORE
from minillm.course.tasks.ex_1_2.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
