"""The one transformer, its weights and its tokenizer."""
