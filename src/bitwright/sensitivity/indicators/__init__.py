"""Indicators: each says in its own way how much an operator suffers in low precision."""
