"""Attention over the paged KV store."""
