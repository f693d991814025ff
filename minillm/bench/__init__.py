"""`minillm bench`: the engine against its peers, interleaved in one run. Each engine is a process of its own."""
