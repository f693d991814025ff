"""Programs that measure one engine each. They are run as scripts, by a Python that need not have minillm or any other engine."""
