"""The public names: all there, and cheap to look at."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import bitwright


def test_every_public_name_is_there() -> None:
    assert sorted(bitwright._HOME) == sorted(bitwright.__all__)
    for name in bitwright.__all__:
        assert getattr(bitwright, name) is not None
    assert set(bitwright.__all__) <= set(dir(bitwright))


def test_a_function_stays_a_function_when_plugins_are_loaded() -> None:
    # a subpackage of the same name would take its place as soon as it is imported
    code = (
        "import bitwright, pkgutil, importlib.util\n"
        "triton = importlib.util.find_spec('triton')\n"
        "for m in pkgutil.walk_packages(bitwright.__path__, 'bitwright.'):\n"
        "    if '__main__' not in m.name and (triton or '.triton.' not in m.name):\n"
        "        importlib.import_module(m.name)\n"
        "import types\n"
        "assert not [n for n in bitwright.__all__ if isinstance(getattr(bitwright, n), types.ModuleType)]\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, bitwright; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_quantize_does_not_import_training_profiling_or_cluster_code() -> None:
    code = (
        "import sys, bitwright\nbitwright.quantize\n"
        "packages = {name.split('.')[1] for name in sys.modules if name.startswith('bitwright.')}\n"
        "assert len([name for name in sys.modules if name.startswith('bitwright')]) < 100\n"
        "assert not packages & {'training', 'profiling', 'cluster', 'tuning', 'bench', 'reports', 'cli'}, packages\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_package_or_module_has_the_name_of_a_public_function() -> None:
    inside = {module.name for module in pkgutil.iter_modules(bitwright.__path__)}
    assert not inside & set(bitwright.__all__)
