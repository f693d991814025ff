from ..strategies import one_thread  # noqa: F401
