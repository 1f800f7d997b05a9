"""Planners: from a graph, a backend and a goal to a plan."""

from bitwright.planners.uniform import make_plan

__all__ = ["make_plan"]
