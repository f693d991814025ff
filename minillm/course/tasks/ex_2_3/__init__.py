"""Exercise 2.3: a mixture of experts with grouped rows, a bias in the wrong place, and a bias that spreads the load."""

from minillm.course.tasks.ex_2_3.broken import BREAK
from minillm.course.tasks.ex_2_3.core import CORE
from minillm.course.tasks.ex_2_3.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
