"""The JSON Schemas of all file formats. `python tests/support/schemas.py` writes them into docs/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bitwright.backends import BackendTable
from bitwright.bench import GridConfig
from bitwright.cluster import Cluster
from bitwright.core.registry import ARTEFACTS
from bitwright.plan.schema import PlanFile
from bitwright.profiling import DeviceProfile
from bitwright.reports import Record
from bitwright.tuning import TuneConfig

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
MODELS: dict[str, type[BaseModel]] = {
    "backend-2": BackendTable,
    "cluster-1": Cluster,
    "device-profile-1": DeviceProfile,
    "grid-1": GridConfig,
    "plan-1": PlanFile,
    "report-2": Record,
    "tune-1": TuneConfig,
    **{
        f"artefact-{name}-1": document
        for name in ARTEFACTS.names()
        if (document := ARTEFACTS.get(name).document) is not None
    },
}


def json_schema(name: str) -> dict[str, Any]:
    """The schema of a format, by the name of its file."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"bitwright-{name}"}
    return head | MODELS[name].model_json_schema()


if __name__ == "__main__":
    for name in MODELS:
        text = json.dumps(json_schema(name), indent=2, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
