"""Record the operators that a model calls."""

from bitwright.graph.capture import capture, capture_paths
from bitwright.graph.graph import Graph, Op, Output, Parameter, Port, Source

__all__ = ["Graph", "Op", "Output", "Parameter", "Port", "Source", "capture", "capture_paths"]
