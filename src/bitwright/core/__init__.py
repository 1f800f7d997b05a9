"""Formats, errors, the plugin registry and file handling. This package does not depend on models."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("bitwright")
