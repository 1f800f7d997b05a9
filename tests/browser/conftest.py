"""Headless Chromium. Where it is missing, these tests skip themselves and say why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium (or CHROMIUM), with an empty profile."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed: pip install playwright")
    named = os.environ.get("CHROMIUM")
    path = named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None or not Path(path).exists():
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM to one")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield running
        running.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; every error of its scripts and everything that it asks the network for fails the test."""
    troubles: list[str] = []
    contexts: list[Any] = []

    def open_page(path: Path, *, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: None if request.url.startswith("file:") else troubles.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
