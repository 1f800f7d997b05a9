"""Artefacts for targets without support for Q/DQ pairs: a float ONNX model and a file with its grids."""

from bitwright.deploy.artefacts.base import Document, Grid, Sidecar, TensorGrid
from bitwright.deploy.artefacts.store import Stored, read_artefact

__all__ = ["Document", "Grid", "Sidecar", "Stored", "TensorGrid", "read_artefact"]
