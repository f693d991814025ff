"""Exercise 5.2: a token budget that serves decodes first, where a mixed step is sampled, the largest chunk within a limit."""

from minillm.course.tasks.ex_5_2.broken import BREAK
from minillm.course.tasks.ex_5_2.core import CORE
from minillm.course.tasks.ex_5_2.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
