"""The course's tasks: ``TASKS = (Task(...), ...)`` in one package per exercise notebook, ex_1_1 for exercise 1.1.

Each task has a module of its own there: core, broken ("1.1 break") and stretch; common holds what several of them use. The
exercises on paper, 0.1 and 0.2, are one module each.
"""
