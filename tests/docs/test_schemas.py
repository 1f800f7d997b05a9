from __future__ import annotations

import json

import jsonschema
import pytest
from schemas import FOLDER, MODELS, json_schema

from bitwright import plan


@pytest.mark.parametrize("name", MODELS)
def test_published_schemas_match_the_code(name: str) -> None:
    schema = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    published = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert published == schema, "run: python tests/support/schemas.py"


def test_every_published_schema_has_a_model() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(MODELS)


def test_plan_prints_the_published_schema() -> None:
    assert plan.json_schema() == json_schema("plan-1")
