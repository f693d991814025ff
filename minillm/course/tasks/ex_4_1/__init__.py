"""Exercise 4.1: an allocator that counts holders, a copy on write that is forgotten, and what a life in blocks wastes."""

from minillm.course.tasks.ex_4_1.broken import BREAK
from minillm.course.tasks.ex_4_1.core import CORE
from minillm.course.tasks.ex_4_1.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
