"""One module per lesson: what its panel measures and draws."""
