"""Traffic: when requests arrive and how long they are, replayed on an engine in real time or simulated without a model."""
