"""The course's tasks: ``TASKS = (Task(...), ...)`` in one module per exercise notebook, ex_1_1.py for exercise 1.1."""
