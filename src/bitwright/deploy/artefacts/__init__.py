"""What is written for targets whose tools don't read Q/DQ pairs: a float model and a file of grids beside it."""

from bitwright.deploy.artefacts.base import Document, Grid, Sidecar, TensorGrid
from bitwright.deploy.artefacts.store import Stored, read_artefact

__all__ = ["Document", "Grid", "Sidecar", "Stored", "TensorGrid", "read_artefact"]
