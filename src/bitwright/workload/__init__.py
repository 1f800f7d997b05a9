"""Workload: the model, its data, loss and metrics, in one object that every verb takes.

On the command line, a workload is written as ``file.py:function``, as ``hf:FOLDER`` or ``gguf:FILE`` (language models),
or as the name of a built-in or plugin.
"""

from __future__ import annotations

from bitwright.core.tensor_tree import shape_of
from bitwright.workload.data import batches, call, call_on, pairs, report_data_errors
from bitwright.workload.datasets import ImageFiles, TransformedImages
from bitwright.workload.loading import load_object, load_workload, open_workload
from bitwright.workload.metrics import can_measure, evaluate, hits_of
from bitwright.workload.workload import Loss, Workload, loss_of, trainable_parameters

__all__ = [
    "ImageFiles",
    "Loss",
    "TransformedImages",
    "Workload",
    "batches",
    "call",
    "call_on",
    "can_measure",
    "evaluate",
    "hits_of",
    "load_object",
    "load_workload",
    "loss_of",
    "open_workload",
    "pairs",
    "report_data_errors",
    "shape_of",
    "trainable_parameters",
]
