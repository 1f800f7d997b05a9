"""Plans: schema, load, save, validate, diff."""

from bitwright.plan.plan import Change, Device, FoldSpec, Plan, SiteSpec
from bitwright.plan.schema import (
    DEFAULT_STRATEGY,
    NO_FOLDING,
    SCHEMA_VERSION,
    STRATEGIES,
    ComputeSpec,
    json_schema,
    known_strategies,
)

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
