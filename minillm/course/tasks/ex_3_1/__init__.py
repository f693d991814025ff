"""Exercise 3.1: attention over tiles of keys, a running softmax with a fault in it, and the merge of split keys."""

from minillm.course.tasks.ex_3_1.broken import BREAK
from minillm.course.tasks.ex_3_1.core import CORE
from minillm.course.tasks.ex_3_1.stretch import STRETCH

TASKS = (CORE, BREAK, STRETCH)
