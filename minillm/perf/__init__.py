"""Counting work, knowing the machine, predicting time."""
