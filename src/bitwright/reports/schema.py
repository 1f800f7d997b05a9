"""The published JSON Schema of `report.json`."""

from __future__ import annotations

import json
import sys
from typing import Any

from bitwright.reports.record import RECORD_VERSION, Record


def json_schema() -> dict[str, Any]:
    """The schema of the current version."""
    name = f"bitwright-report-{RECORD_VERSION}"
    schema = Record.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name, **schema}


if __name__ == "__main__":  # python -m bitwright.reports.schema > docs/schemas/report-2.json
    sys.stdout.write(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")
