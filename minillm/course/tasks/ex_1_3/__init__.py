"""Exercise 1.3: load or recompute, a tier that gives away what is about to be read, and a load that is all or nothing."""

from minillm.course.tasks.ex_1_3.broken import BREAK
from minillm.course.tasks.ex_1_3.core import CORE
from minillm.course.tasks.ex_1_3.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
