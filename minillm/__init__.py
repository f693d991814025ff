"""minillm: a small, real LLM inference engine."""
