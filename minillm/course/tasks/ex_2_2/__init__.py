"""Exercise 2.2: an indexer of bounds, the keys that a query reads with a fault in it, and layers that share a choice."""

from minillm.course.tasks.ex_2_2.broken import BREAK
from minillm.course.tasks.ex_2_2.core import CORE
from minillm.course.tasks.ex_2_2.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
