"""JSON Schemas of all sidecars; `python -m bitwright.deployment.artefacts.schemas docs/schemas` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bitwright.core.files import write_text
from bitwright.core.registry import ARTEFACTS
from bitwright.deployment.artefacts.base import Sidecar


def json_schemas() -> dict[str, dict[str, Any]]:
    """Schemas by file name, for JSON formats."""
    found: dict[str, dict[str, Any]] = {}
    for name in ARTEFACTS.names():
        sidecar: type[Sidecar] = ARTEFACTS.get(name)
        if sidecar.document is not None:
            identity = f"bitwright-artefact-{name}-1"
            head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": identity}
            found[f"artefact-{name}-1.json"] = head | sidecar.document.model_json_schema()
    return found


if __name__ == "__main__":
    for file, schema in json_schemas().items():
        write_text(Path(sys.argv[1]) / file, json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
