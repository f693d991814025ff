"""Speculative decoding: somebody cheap proposes tokens, the model checks several in one pass, the answer stays the same."""
