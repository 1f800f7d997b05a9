"""Search strategies: each is a generator that yields candidates and receives their outcomes."""
