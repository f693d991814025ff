"""Exercise 4.2: absorbed attention over latents, a scale of the wrong width, and what tensor parallelism makes of a cache."""

from minillm.course.tasks.ex_4_2.broken import BREAK
from minillm.course.tasks.ex_4_2.core import CORE
from minillm.course.tasks.ex_4_2.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
