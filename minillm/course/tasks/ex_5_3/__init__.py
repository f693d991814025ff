"""Exercise 5.3: the padding that decode steps are replayed with, blocks that are freed too early, a schedule that runs ahead."""

from minillm.course.tasks.ex_5_3.broken import BREAK
from minillm.course.tasks.ex_5_3.core import CORE
from minillm.course.tasks.ex_5_3.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
