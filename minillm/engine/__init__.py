"""The loop: schedule, run, update."""
