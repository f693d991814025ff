"""The course's tools. They use the engine; the engine knows nothing of them."""
