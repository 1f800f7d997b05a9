"""What changes from one plan to another, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.plan.files import spec_entry
from bitwright.plan.plan import Change, ComputeSpec, Device, Plan, SiteSpec


def diff(before: Plan, after: Plan) -> list[Change]:
    """All changes: the plan's head, folds, floats, sites, and each device's sites."""
    changes = [
        Change(key, getattr(before, key), getattr(after, key))
        for key in ("model", "backend")
        if getattr(before, key) != getattr(after, key)
    ]
    changes += _compare("fold", *({norm: str(fold) for norm, fold in plan.fold.items()} for plan in (before, after)))
    changes += _compare("float", before.float, after.float)
    changes += _compare("", _texts(before.sites), _texts(after.sites))
    changes += _compare("compute", _kernels(before.compute), _kernels(after.compute))
    for kind in dict.fromkeys([*before.devices, *after.devices]):
        a, b = before.devices.get(kind), after.devices.get(kind)
        changes += _compare("devices", _about(kind, a), _about(kind, b))
        changes += _compare(f"devices.{kind}", _texts(a.sites if a else {}), _texts(b.sites if b else {}))
        kernels = (_kernels(a.compute if a else {}), _kernels(b.compute if b else {}))
        changes += _compare(f"devices.{kind} compute", *kernels)
    return changes


def _about(kind: str, device: Device | None) -> dict[str, str]:
    if device is None:
        return {}
    words = [
        f"batch={device.batch}" if device.batch is not None else "",
        "channels_last" if device.channels_last else "",
        f"why={device.why}" if device.why else "",
    ]
    return {kind: ", ".join(word for word in words if word) or "present"}


def _texts(sites: Mapping[str, SiteSpec]) -> dict[str, str]:
    return {name: _text(spec_entry(spec)) for name, spec in sites.items()}


def _kernels(compute: Mapping[str, ComputeSpec]) -> dict[str, str]:
    return {name: _text(spec.entry()) for name, spec in compute.items()}


def _text(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    return ", ".join(f"{key}={value}" if key != "format" else str(value) for key, value in entry.items())


def _compare(prefix: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    start = f"{prefix} " if prefix else ""
    return [
        Change(f"{start}{key}", before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]
