"""The two tutorials as a package of somebody else: a quantizer and a hardware target, one file each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-package"
version = "1.0"

[tool.setuptools]
packages = ["my_package"]
package-data = {my_package = ["*.yaml"]}

"""
SCRIPT = """\
import torch
from torch import nn

import bitwright as bw
from bitwright.testing import check_quantizer
from my_package.soft_clip import SoftClip

torch.manual_seed(0)
check_quantizer(SoftClip)
model, batch = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)), torch.randn(8, 3, 8, 8)
quantized = bw.quantize(model.eval(), [batch], backend="micro", quantizer="soft-clip")
kinds = {name: type(one) for name, one in bw.quantizers_of(model).items()}
assert kinds["0:input"] is kinds["0:weight"] is SoftClip, kinds
scales = [one.grid().scale.log2() for one in bw.quantizers_of(model).values()]
assert all(torch.equal(scale, scale.round()) for scale in scales)
assert any(name.startswith("bitwright.") for name, _ in model.named_parameters())
artefact = quantized.export("model.onnx")
assert quantized.check(artefact.path, [batch]).passed
print(quantized.plan.backend)
"""


def block(page: str, language: str, word: str) -> str:
    """The code block of a page that contains a word."""
    parts = (DOCS / page).read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    (found,) = [text for part in parts if word in (text := part.partition("```")[0])]
    return found


@pytest.mark.slow
def test_a_package_adds_a_quantizer_and_a_target(tmp_path: Path) -> None:
    source = tmp_path / "source" / "my_package"
    source.mkdir(parents=True)
    entries = [
        block("add-a-quantizer.md", "toml", "bitwright.quantizers"),
        block("add-a-backend.md", "toml", "bitwright.backends"),
    ]
    (source.parent / "pyproject.toml").write_text(PROJECT + "\n".join(entries))
    (source / "soft_clip.py").write_text(block("add-a-quantizer.md", "python", "class SoftClip"))
    (source / "micro.yaml").write_text(block("add-a-backend.md", "yaml", "name: micro"))
    (source / "__init__.py").write_text(block("add-a-backend.md", "py", "my_package/__init__.py"))
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(source.parent)], check=True, timeout=300)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for kind, name in (("quantizers", "soft-clip"), ("backends", "micro")):
        listed = {row["name"]: row for row in json.loads(run("-m", "bitwright", "list", kind, "--json"))[kind]}
        assert listed[name]["about"]
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run("script.py").split()[-1] == "micro"
    options = ["--backend", "micro", "--quantizer", "soft-clip", "-o", "plan.yaml"]
    run("-m", "bitwright", "plan", "digits", *options)
    assert "soft-clip" in (tmp_path / "plan.yaml").read_text()
    run("-m", "bitwright", "quantize", "digits", "--plan", "plan.yaml", "-o", "quantized")
    assert (tmp_path / "quantized" / "report.html").is_file()
    assert "backend: micro" in (tmp_path / "quantized" / "plan.yaml").read_text()
