"""Formats, errors, the plugin registry and file handling. This package does not depend on models."""
