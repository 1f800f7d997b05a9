"""capture(): what a model really does, recorded from real inputs."""

from bitwright.graph.capture import capture
from bitwright.graph.graph import Graph, Op, Output, Parameter, Port, Source

__all__ = ["Graph", "Op", "Output", "Parameter", "Port", "Source", "capture"]
