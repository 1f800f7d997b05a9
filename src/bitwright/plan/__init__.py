"""Plan: load, save, validate, diff."""

from bitwright.plan.plan import Change, Device, Plan, SiteSpec
from bitwright.plan.schema import SCHEMA_VERSION, json_schema

__all__ = ["SCHEMA_VERSION", "Change", "Device", "Plan", "SiteSpec", "json_schema"]
