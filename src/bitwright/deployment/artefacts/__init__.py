"""Artefacts for targets without support for Q/DQ pairs: a float ONNX model and a file with its grids."""

from bitwright.deployment.artefacts.base import Document, Sidecar, Stored, StoredGrid, TensorGrid, read_artefact

__all__ = ["Document", "Sidecar", "Stored", "StoredGrid", "TensorGrid", "read_artefact"]
