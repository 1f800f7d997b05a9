"""Indicators: different measures of an operator's sensitivity to low precision."""
