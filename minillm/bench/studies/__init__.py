"""One module per study; see minillm.bench.study."""
