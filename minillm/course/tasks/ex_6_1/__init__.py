"""Exercise 6.1: the accept rule of a drawn draft, a pass that goes on behind a refusal, the test that a careless rule fails."""

from minillm.course.tasks.ex_6_1.broken import BREAK
from minillm.course.tasks.ex_6_1.core import CORE
from minillm.course.tasks.ex_6_1.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
