"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))  # helpers that several tests import

# A shared machine makes one example late now and then: pytest-timeout watches over whole tests instead.
settings.register_profile("bitwright", deadline=None)
settings.load_profile("bitwright")


@pytest.fixture(scope="session", autouse=True)
def samples_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Samples that tests take aren't the device's: nothing goes to the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data: BITWRIGHT_DATA, or the one that developers keep next to the repository."""
    named = os.environ.get("BITWRIGHT_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: BITWRIGHT_DATA is {named or 'not set'}, and there is no folder {folder}")
    return folder
