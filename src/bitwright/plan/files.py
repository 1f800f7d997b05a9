"""Read and write plan files (YAML)."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from bitwright.core.documents import MOST_YAML, parse_yaml, read_text, reject_other_kind
from bitwright.core.errors import BitwrightError, FormatError, PlanError, Problem
from bitwright.core.files import write_text
from bitwright.core.formats import Format
from bitwright.core.schemas import problems_of
from bitwright.plan.plan import Change, Device, FoldSpec, Plan, SiteSpec
from bitwright.plan.schema import (
    NO_FOLDING,
    SCHEMA_VERSION,
    ComputeEntry,
    ComputeSpec,
    PlanFile,
    SiteEntry,
    known_strategies,
)


def load_plan(path: Path) -> Plan:
    """Read a plan file."""
    reject_other_kind(path, what="a plan file", fix="give the path of a plan.yaml, as `bitwright plan -o` writes it")
    text = read_text(path, what="the plan", fix="give the path of a plan file (YAML)", most=MOST_YAML)
    return parse_plan(text, where=str(path))


def parse_plan(text: str, *, where: str) -> Plan:
    """Parse a plan and report every problem that can be found without the model."""
    data = parse_yaml(text, where=where, finite=False)  # plugin options may be infinite
    if not isinstance(data, dict):
        raise BitwrightError(
            "a plan must be a mapping",
            where=where,
            value=data,
            fix=f"begin with `bitwright: {SCHEMA_VERSION}`",
            code="not-a-mapping",
        )
    if data.get("bitwright") != SCHEMA_VERSION or data["bitwright"] is True:  # True == 1
        raise BitwrightError(
            "unsupported plan schema version",
            where=f"{where}: bitwright",
            value=data.get("bitwright"),
            fix=f"this Bitwright reads version {SCHEMA_VERSION}",
            code="wrong-version",
        )
    try:
        file = PlanFile.model_validate(data)
    except ValidationError as error:
        raise _schema_error(data, error, where) from error
    problems: list[Problem] = []
    plan = _plan(file, problems)
    if problems:
        raise _error(problems, where, plan)
    return plan


def _schema_error(data: dict[str, Any], error: ValidationError, where: str) -> PlanError:
    """All problems of the file: those of the schema, and those of the entries that conform to it."""
    problems, valid = _problems(error), copy.deepcopy(data)
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        _remove(valid, one["loc"])
    more: list[Problem] = []
    try:
        plan = _plan(PlanFile.model_validate(valid), more)
    except (ValidationError, BitwrightError):
        return PlanError(problems, title=f"{where} has problems")
    known = {problem.where for problem in problems}
    problems += [problem for problem in (*more, *plan.validate()) if problem.where not in known]
    return _error(problems, where, plan)


def _remove(data: Any, path: tuple[Any, ...]) -> None:
    """Remove an invalid value: of an entry in a section, the whole entry, unless it is a key that doesn't exist."""
    section = data.get(path[0]) if path else None
    if len(path) > 1 and isinstance(section, dict) and path[0] != "devices":
        section.pop(path[1], None)
    elif path:
        data.pop(path[0], None)


def _error(problems: list[Problem], where: str, plan: Plan) -> PlanError:
    error = PlanError(problems, title=f"{where} has problems")
    error.plan = plan
    return error


def _plan(file: PlanFile, problems: list[Problem]) -> Plan:
    return Plan(
        sites=_specs(file.sites, "", problems),
        fold={n: e if isinstance(e, str) else FoldSpec(**e.model_dump()) for n, e in file.fold.items()},
        float=file.float,
        compute=_computes(file.compute),
        devices={
            kind: Device(
                sites=_specs(device.sites, f"devices.{kind} ", problems),
                compute=_computes(device.compute),
                batch=device.batch,
                channels_last=device.channels_last,
                why=device.why or "",
            )
            for kind, device in file.devices.items()
        },
        backend=file.backend,
        model=file.model,
    )


# pydantic adds the class names of union branches to its paths; users don't know them
_BRANCHES = ("SiteEntry", "FoldEntry", "ComputeEntry", "str", "dict[str,any]")


def _problems(error: ValidationError) -> list[Problem]:
    fix = f"fix this value (docs/schemas/plan-{SCHEMA_VERSION}.json)"
    problems = problems_of(error, PlanFile, fix=fix, union_branches=_BRANCHES)
    return [_folding_problem(problem) for problem in problems]


def _folding_problem(problem: Problem) -> Problem:
    """Name the valid strategies if the problem is an invalid one."""
    where = problem.where or ""
    if problem.code != "invalid-value" or not (where.startswith("fold.") and where.endswith(".strategy")):
        return problem
    norm = where.removeprefix("fold.").removesuffix(".strategy")
    if problem.value == NO_FOLDING:
        what, fix = "`fold` lists only norms that are folded", f"remove {norm} from `fold`"
    else:
        what, fix = "unknown folding strategy", known_strategies()
    return replace(problem, what=what, fix=fix, code="unknown-folding-strategy")


def _specs(entries: Mapping[str, SiteEntry | str], prefix: str, problems: list[Problem]) -> dict[str, SiteSpec]:
    specs: dict[str, SiteSpec] = {}
    for name, entry in entries.items():
        if isinstance(entry, str):
            entry = SiteEntry(format=entry)
        if entry.format is None and entry.share is None:
            problems.append(
                Problem(
                    what="a site needs a format",
                    where=prefix + name,
                    fix='add `format: "int8/tensor/sym"`',
                    code="missing-key",
                )
            )
            continue
        try:
            format = Format.parse(entry.format or "float")
            observer, observer_options = _named(entry.observer, "minmax")
            quantizer, quantizer_options = _named(entry.quantizer, "plain")
        except FormatError as error:
            found = error.problems[0]
            problems.append(
                Problem(what=found.what, where=prefix + name, value=found.value, fix=found.fix, code=found.code)
            )
            continue
        except KeyError:
            problems.append(
                Problem(
                    what="this mapping needs a `name`",
                    where=prefix + name,
                    fix="{name: percentile, …}",
                    code="missing-key",
                )
            )
            continue
        specs[name] = SiteSpec(
            format=format,
            observer=observer,
            observer_options=observer_options,
            quantizer=quantizer,
            quantizer_options=quantizer_options,
            guard=entry.guard,
            axis=entry.axis,
            share=entry.share,
            why=entry.why or "",
        )
    return specs


def _computes(entries: Mapping[str, ComputeEntry | str]) -> dict[str, ComputeSpec]:
    return {
        name: ComputeSpec(format=entry)
        if isinstance(entry, str)
        else ComputeSpec(**{**entry.model_dump(), "why": entry.why or ""})
        for name, entry in entries.items()
    }


def _named(value: str | dict[str, Any] | None, default: str) -> tuple[str, dict[str, Any]]:
    if value is None:
        return default, {}
    if isinstance(value, str):
        return value, {}
    options = dict(value)
    return str(options.pop("name")), options


def spec_entry(spec: SiteSpec) -> dict[str, Any] | str:
    """The entry of one site in a plan file, without default values."""
    entry: dict[str, Any] = {}
    if spec.share is None or not spec.format.is_plain_float:
        entry["format"] = str(spec.format)
    if spec.observer_options:
        entry["observer"] = {"name": spec.observer, **spec.observer_options}
    elif spec.observer != "minmax":
        entry["observer"] = spec.observer
    if spec.quantizer_options:
        entry["quantizer"] = {"name": spec.quantizer, **spec.quantizer_options}
    elif spec.quantizer != "plain":
        entry["quantizer"] = spec.quantizer
    for key in ("guard", "axis", "share"):
        if getattr(spec, key) is not None:
            entry[key] = getattr(spec, key)
    if spec.why:
        entry["why"] = spec.why
    return entry["format"] if list(entry) == ["format"] else entry


def fold_entry(fold: str | FoldSpec) -> dict[str, Any] | str:
    """The entry of one folded norm in a plan file."""
    if isinstance(fold, str):
        return fold
    changed = {f.name: getattr(fold, f.name) for f in fields(fold) if getattr(fold, f.name) != f.default}
    return {"into": fold.into, **changed}


class _Representer(SafeRepresenter):
    """A separate class, so that other users of ruamel.yaml are not affected."""


def _represent_text(representer: Any, text: str) -> Any:
    # YAML treats these characters as line breaks unless they are escaped in double quotes
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _represent_text)


def plan_data(plan: Plan) -> dict[str, Any]:
    """The content of the plan file. Keys have a fixed order, sites the order of the plan."""
    data: dict[str, Any] = {"bitwright": SCHEMA_VERSION}
    if plan.model is not None:
        data["model"] = plan.model
    if plan.backend is not None:
        data["backend"] = plan.backend
    if plan.sites:
        data["sites"] = {name: spec_entry(spec) for name, spec in plan.sites.items()}
    if plan.fold:
        data["fold"] = {norm: fold_entry(fold) for norm, fold in plan.fold.items()}
    if plan.float:
        data["float"] = dict(plan.float)
    if plan.compute:
        data["compute"] = {name: spec.entry() for name, spec in plan.compute.items()}
    if plan.devices:
        data["devices"] = {}
        for kind, device in plan.devices.items():
            entry: dict[str, Any] = {"sites": {name: spec_entry(spec) for name, spec in device.sites.items()}}
            if device.compute:
                entry["compute"] = {name: spec.entry() for name, spec in device.compute.items()}
            if device.batch is not None:
                entry["batch"] = device.batch
            if device.channels_last:
                entry["channels_last"] = True
            if device.why:
                entry["why"] = device.why
            data["devices"][kind] = entry
    return data


def dump_plan(plan: Plan) -> str:
    """The text of the plan file."""
    data = plan_data(plan)
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.allow_unicode = True
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def save_plan(plan: Plan, path: Path) -> Path:
    """Write the plan atomically."""
    return write_text(path, dump_plan(plan))


def diff(before: Plan, after: Plan) -> list[Change]:
    """All changes: header, folds, floats, sites, and the sites of each device."""
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
        changes += _compare("devices", _device_texts(kind, a), _device_texts(kind, b))
        changes += _compare(f"devices.{kind}", _texts(a.sites if a else {}), _texts(b.sites if b else {}))
        kernels = (_kernels(a.compute if a else {}), _kernels(b.compute if b else {}))
        changes += _compare(f"devices.{kind} compute", *kernels)
    return changes


def _device_texts(kind: str, device: Device | None) -> dict[str, str]:
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
