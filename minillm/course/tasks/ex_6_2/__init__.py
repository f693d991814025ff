"""Exercise 6.2: prompt lookup as a proposer, a drafter that trusts stale KV, and the length that pays."""

from minillm.course.tasks.ex_6_2.broken import BREAK
from minillm.course.tasks.ex_6_2.core import CORE
from minillm.course.tasks.ex_6_2.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
