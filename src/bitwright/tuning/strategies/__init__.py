"""How to search: each strategy is one generator that yields candidates and is sent their outcomes."""
