"""Where KV lives and who may use it."""
