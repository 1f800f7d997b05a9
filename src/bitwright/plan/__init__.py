"""Plan: load, save, validate, diff."""

from bitwright.plan.plan import Change, ComputeSpec, Device, FoldSpec, Plan, SiteSpec
from bitwright.plan.schema import SCHEMA_VERSION, json_schema
from bitwright.plan.strategies import DEFAULT_STRATEGY, NO_FOLDING, STRATEGIES, known_strategies

__all__ = [
    "DEFAULT_STRATEGY",
    "NO_FOLDING",
    "SCHEMA_VERSION",
    "STRATEGIES",
    "Change",
    "ComputeSpec",
    "Device",
    "FoldSpec",
    "Plan",
    "SiteSpec",
    "json_schema",
    "known_strategies",
]
