"""The engine behind an OpenAI-compatible HTTP interface: `minillm serve`."""
