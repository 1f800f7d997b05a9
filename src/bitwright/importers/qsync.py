"""Import QSync's mappers: .npy files with a pickled dictionary of bits by layer."""

from __future__ import annotations

import fnmatch
import io
import pickle
import pickletools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bitwright.core.documents import read_bytes
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean, log_warnings
from bitwright.core.registry import KERNELS
from bitwright.graph import Graph, Op
from bitwright.plan.plan import Device, Plan
from bitwright.plan.schema import FLOAT, ComputeSpec
from bitwright.profiling.execution import Cast, Execution, OperatorUnderPlan

__all__ = ["QSYNC_FORMATS", "MapperSummary", "QSyncExecution", "load_mapper", "plan_of_mapper", "summarize_mapper"]

BITS = (8, 16, 19, 32)
"""The bit widths of a mapper; 19 means TF32, which PyTorch sets for the whole process."""
_NAMES = {  # names of layers in mappers, by our kind
    "conv2d": ("conv", "conv2d", "qconv"),
    "conv1d": ("conv1d",),
    "linear": ("linear", "fc", "qlinear"),
    "layer_norm": ("layernorm", "layer_norm", "ln"),
    "batch_norm": ("bn", "batchnorm", "batchnorm2d", "batch_norm"),
    "embedding": ("embedding", "emb"),
    "max_pool2d": ("maxpool", "maxpool2d", "max_pool2d"),
    "avg_pool2d": ("avgpool", "avgpool2d", "avg_pool2d"),
    "adaptive_avg_pool2d": ("adaptiveavgpool2d", "adaptive_avg_pool2d"),
    "matmul": ("matmul", "bmm"),
    "relu": ("relu",),
    "gelu": ("gelu",),
    "softmax": ("softmax",),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv2d": (nn.Conv2d,),
    "conv1d": (nn.Conv1d,),
    "linear": (nn.Linear,),
    "layer_norm": (nn.LayerNorm,),
    "batch_norm": (nn.BatchNorm2d,),
    "embedding": (nn.Embedding,),
    "max_pool2d": (nn.MaxPool2d,),
    "avg_pool2d": (nn.AvgPool2d,),
    "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d,),
    "relu": (nn.ReLU,),
    "gelu": (nn.GELU,),
    "softmax": (nn.Softmax,),
}
_INTEGER = ("conv2d", "linear")  # QSync has integer kernels for these; all others run in FP16 below 32 bits
_NUMBERED = re.compile(r"([A-Za-z]\w*?)_([0-9]{1,9})")


def load_mapper(path: str | Path) -> dict[str, int]:
    """Read the bits of each layer from a file."""
    value = load_npy(path)
    if isinstance(value, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        value = {str(key): bits for key, bits in value}
    if not isinstance(value, Mapping):
        fix = "a mapper is a dictionary of bits by layer"
        raise BitwrightError("not a mapper", where=str(path), value=type(value).__name__, fix=fix, code="invalid-value")
    return {str(key): _bits(bits) for key, bits in value.items()}


@dataclass(frozen=True, kw_only=True)
class MapperSummary:
    """What a mapper runs in 8, 16 and 32 bits."""

    counts: Mapping[int, Mapping[str, int]]
    """The number of layers of each kind, by bits."""
    raised: tuple[str, ...] = ()
    """Layers with 8 bits in the file that QSync runs in 16 bits, since it has no 8-bit kernel for them."""

    def __str__(self) -> str:
        parts = []
        for bits, kinds in sorted(self.counts.items()):
            text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            parts.append(f"{bits} bit: {text}")
        if self.raised:
            parts.append(f"{len(self.raised)} layers have 8 bits in the file and run in 16")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The counts and the raised layers."""
        counts = {str(bits): dict(kinds) for bits, kinds in self.counts.items()}
        return {"counts": counts, "raised": list(self.raised)}


def summarize_mapper(mapper: Mapping[str, Any]) -> MapperSummary:
    """Count the layers of a mapper by kind and bits. Keys that are names of modules have the kind `module`.

    >>> print(summarize_mapper({"conv_0": 8, "conv2d_1": 16, "layernorm_0": 8, "linear_0": 32}))
    8 bit: 1 conv2d; 16 bit: 1 conv2d, 1 layer_norm; 32 bit: 1 linear; 1 layers have 8 bits in the file and run in 16
    """
    problems = list(_width_problems(mapper))
    if problems:
        raise PlanError(problems, title="the mapper has problems")
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    raised = []
    for key, bits in mapper.items():
        kind = _split(key)[0] or "module"
        runs = _runs(kind, bits)
        counts[runs][kind] += 1
        if runs != bits and bits == 8:
            raised.append(key)
    return MapperSummary(counts={bits: dict(kinds) for bits, kinds in counts.items()}, raised=tuple(raised))


def plan_of_mapper(
    mapper: Mapping[str, Any],
    graph: Graph,
    *,
    model: nn.Module | None = None,
    kind: str | None = None,
    exclude: Sequence[str] = (),
) -> Plan:
    """The plan of a mapper. With `kind`, it is the section of that device.

    Layers have a module's name, or are counted by kind in the order in which the model defines them (`named_modules`),
    as `conv2d_0` or `linear_7`. Without `model`, the order of the parameters replaces it, which differs only if the
    model has layers that it doesn't run. Modules whose names match `exclude` are not counted and stay in float, as
    QSync doesn't convert the modules that its configuration names. A layer whose precision has no kernel here stays in
    float; the plan says so.
    """
    layers = _Layers(graph, model, exclude)
    compute: dict[str, ComputeSpec] = {}
    problems: list[Problem] = list(layers.unmatched_patterns())
    idle: list[str] = []
    keys: dict[str, str] = {}
    for key, bits in mapper.items():
        found = layers.find(key)
        if found is None:
            problems.append(layers.problem(key))
        elif not found:
            idle.append(key)
        elif _is_width(bits):
            for op in found:
                other = keys.setdefault(op.name, key)
                if mapper[other] != bits:
                    what, value = f"the layer {op.name} has other bits under the key {other}", f"{key}: {bits}"
                    fix = "keep one of the two keys"
                    problems.append(Problem(what=what, where="mapper", value=value, fix=fix, code="ambiguous-name"))
                compute[op.name] = _spec(op, key, bits)
    problems += _width_problems(mapper)
    if problems:
        raise PlanError(problems, title="the mapper doesn't fit the model")
    if idle:
        log_warnings([Problem(what="the model doesn't run these layers", where=", ".join(idle), code="no-effect")])
    plan = Plan(compute=compute) if kind is None else Plan(devices={kind: Device(compute=compute)})
    problems = plan.validate(graph)
    if problems:
        raise PlanError(problems, title="the plan of the mapper has problems")
    return plan


def _spec(op: Op, key: str, bits: int) -> ComputeSpec:
    why = f"{key}: {bits} bits in QSync's mapper"
    format = {8: "int8", 16: "fp16"}.get(_runs(op.kind, bits), FLOAT)
    if format == FLOAT:
        return ComputeSpec(format=FLOAT, why=why)
    spec = ComputeSpec(format=format, why=why)
    reason = KERNELS.get(format).refuses_named(op, spec)
    return spec if reason is None else ComputeSpec(format=FLOAT, why=f"{why}; {reason}")


def _runs(kind: str, bits: int) -> int:
    """The bits that QSync runs a layer with."""
    if bits == 19:
        return 32
    return bits if bits > 8 or kind in (*_INTEGER, "module") else 16


class QSyncExecution:
    """How QSync runs operators on a GPU, for predictions: results keep their type, casts are where types differ.

    Layers with 16 bits read and write float16. Integer layers read INT8 and write float32, and their gradients have 16
    bits. Layers without low precision cast their inputs to float32; operators that are not layers run in the type that
    they get. Register it in `bitwright.profiling.IMPLEMENTATIONS` to predict a mapper as QSync runs it, with the costs
    of `derived_profile`.
    """

    def execution(self, operator: OperatorUnderPlan) -> Execution | None:
        """The operator with casts of its weights."""
        kind = operator.call.kind
        spec = operator.plan.compute.get(operator.name)
        format = FLOAT if spec is None else spec.format
        if format == "fp16":
            weights = () if kind not in _INTEGER else (Cast("weight", "float32→float16", weight=True),)
            return Execution(QSYNC_FORMATS[0], weights, takes="float16", gives="float16")
        if format == "int8":
            weights = (Cast("weight", "float32→int8", weight=True),)
            return Execution(QSYNC_FORMATS[1], weights, takes="int8", gives="float32")
        if kind in (*_INTEGER, "embedding", "layer_norm", "batch_norm"):
            return Execution("float32", takes="float32", gives="float32")
        return None


QSYNC_FORMATS = ("qsync fp16", "qsync int8")
"""The formats of layers that `QSyncExecution` runs."""


class _Layers:
    """The operators of a model by name and by number."""

    def __init__(self, graph: Graph, model: nn.Module | None, exclude: Sequence[str]) -> None:
        self.graph = graph
        self.excluded = exclude
        self.modules: dict[str, list[Op]] = defaultdict(list)
        for op in graph.ops:
            self.modules[op.module].append(op)
        self.names = set(self.modules) if model is None else {name for name, _ in model.named_modules()}
        self.numbered = self._by_parameters() if model is None else self._by_definition(model)

    def find(self, key: str) -> list[Op] | None:
        """The operators of a key: several if a module is called several times, none if the model doesn't run it."""
        for name in (key, key.removeprefix("module.")):  # DDP's prefix
            if name in self.graph.by_name:
                return [self.graph.by_name[name]]
        kind, number = _split(key)
        groups = self.numbered.get(kind, [])
        return groups[number] if kind and number < len(groups) else None

    def problem(self, key: str) -> Problem:
        """Why a key has no layer, with the nearest ones."""
        kind, _ = _split(key)
        name = key.removeprefix("module.")
        numbered = _NUMBERED.fullmatch(key)
        code = "unknown-name"
        if kind:
            written, count = key.rpartition("_")[0], len(self.numbered.get(kind, []))
            what = f"the model has {count} layers of the kind {kind}"
            fix = f"{written}_0 to {written}_{count - 1}" if count else f"it has {self._known()}"
            if self.excluded:
                what += " that are not excluded"
        elif any(op.module == name for op in self.graph.ops):
            what, fix = "several operators belong to this module", did_you_mean(name, self.graph.by_name)
        elif numbered is not None and "." not in key and key not in self.names:
            what, code = "QSync has no layer of this kind", "unknown-kind"
            fix = f"{did_you_mean(numbered[1].lower(), _KINDS)}; the model has {self._known()}"
        else:
            what, fix = "the model has no such layer", did_you_mean(name, self.graph.by_name)
        return Problem(what=what, where="mapper", value=key, fix=fix, code=code)

    def unmatched_patterns(self) -> Iterator[Problem]:
        """Patterns of `exclude` that match nothing."""
        for pattern in self.excluded:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in (*self.names, *self.graph.by_name)):
                fix = did_you_mean(pattern, [*self.names, *self.graph.by_name])
                what = "the pattern matches no module"
                yield Problem(what=what, where="exclude", value=pattern, fix=fix, code="unknown-name")

    def _known(self) -> str:
        counts = {kind: len(groups) for kind, groups in self.numbered.items() if kind in _NAMES and groups}
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no layer that QSync converts"

    def _by_definition(self, model: nn.Module) -> dict[str, list[list[Op]]]:
        groups: dict[str, list[list[Op]]] = defaultdict(list)
        for name, module in model.named_modules():
            for kind, types in _MODULES.items():
                if isinstance(module, types) and not self._is_excluded(name):
                    groups[kind].append([op for op in self.modules.get(name, []) if op.kind == kind])
        defined = {op.name for own in groups.values() for ops in own for op in ops}
        for kind, called in self._by_call().items():  # functions, such as F.relu, come after the modules
            groups[kind] += [ops for ops in called if not defined & {op.name for op in ops}]
        return groups

    def _by_parameters(self) -> dict[str, list[list[Op]]]:
        owners = [name.rpartition(".")[0] for parameter in self.graph.parameters for name in parameter.names]
        place = {name: index for index, name in reversed(list(enumerate(owners)))}
        groups = self._by_call()
        for own in groups.values():
            own.sort(key=lambda ops: place.get(ops[0].module, len(owners)))
        return groups

    def _by_call(self) -> dict[str, list[list[Op]]]:
        """Operators in the order of their first call; the calls of one module belong together."""
        groups: dict[str, dict[str, list[Op]]] = defaultdict(dict)
        for op in self.graph.ops:
            if not self._is_excluded(op.module):
                owner = op.module if op.name.partition("#")[0] == op.module else op.name
                groups[op.kind].setdefault(owner, []).append(op)
        return {kind: list(own.values()) for kind, own in groups.items()}

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.excluded)


def _split(key: str) -> tuple[str, int]:
    """`layernorm_3` as ("layer_norm", 3); ("", 0) for a name of a module."""
    found = _NUMBERED.fullmatch(key)
    kind = None if found is None else _KINDS.get(found[1].lower())
    return ("", 0) if found is None or kind is None else (kind, int(found[2]))


def _width_problems(mapper: Mapping[str, Any]) -> Iterator[Problem]:
    for key, bits in mapper.items():
        if not _is_width(bits):
            fix = f"one of {', '.join(map(str, BITS))}"
            yield Problem(what="unknown bit width", where=f"mapper.{key}", value=bits, fix=fix, code="invalid-value")


def _is_width(bits: Any) -> bool:
    return isinstance(bits, int) and bits in BITS


def _bits(value: Any) -> int:
    if isinstance(value, _Array):  # an array with one number
        value = value.content()
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:9])
    whole = isinstance(value, int | float) and abs(value) < 2**31 and int(value) == value
    return int(value) if whole else value


_MOST_BYTES = 64 << 20
_FIX = "save the data as JSON or YAML; only numbers, texts, lists, dictionaries and NumPy's object arrays are read"
# Opcodes that create other objects, or allocate memory before they read it.
_REFUSED = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
_REFUSED |= {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}
_FRAME_BYTES = 9  # the opcode and the length of the frame


class _Function:
    """A function that a pickle may call. A state that the pickle tries to set is refused."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("sets the state of a function")


class _Dtype:
    __slots__ = ("name", "order")

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = str(name), "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


class _Array:
    """An array within a pickle: objects, or the bytes of numbers."""

    __slots__ = ("items",)

    def __init__(self, *_: Any) -> None:
        self.items: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        shape, dtype, data = state[1], state[2], state[4]
        if isinstance(data, bytes):
            values = np.frombuffer(data, _plain(dtype)).tolist()
            if len(values) != prod(shape):
                raise pickle.UnpicklingError("has an array with another number of values than its shape")
            data = values
        self.items = data

    def content(self) -> Any:
        """The only item, or all."""
        return self.items[0] if isinstance(self.items, list) and len(self.items) == 1 else self.items


def _plain(dtype: _Dtype) -> np.dtype[Any]:
    if re.fullmatch(r"b1|[iu][1248]|f[248]|[US][0-9]{1,4}", dtype.name) is None:
        raise pickle.UnpicklingError(f"has a scalar of type {dtype.name[:20]!r}")
    return np.dtype(f"{dtype.order}{dtype.name}")


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, _plain(dtype))[0].item()


_FUNCTIONS = {
    "numpy.dtype": _Function(_Dtype),
    "numpy.ndarray": _Function(_Array),
    # dictionaries of other kinds; the type of missing values has no meaning here
    "collections.OrderedDict": _Function(dict),
    "collections.Counter": _Function(dict),
    "collections.defaultdict": _Function(lambda *_: {}),
    **{f"builtins.{name}": _Function(lambda: None) for name in ("int", "float", "str", "list", "dict")},
    "_codecs.encode": _Function(lambda text, *_: text.encode("latin-1")),  # bytes in protocols 0 to 2
    **{f"{module}.bytes": _Function(lambda: b"") for module in ("builtins", "__builtin__")},
    **{f"numpy.{core}.multiarray._reconstruct": _Function(_Array) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _Function(_scalar) for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, where: str) -> None:
        super().__init__(io.BytesIO(raw))
        self.where = where

    def find_class(self, module: str, name: str) -> _Function:
        found = _FUNCTIONS.get(f"{module}.{name}")
        if found is None:
            what = "the pickle calls a function that is not data"
            raise BitwrightError(what, where=self.where, value=f"{module}.{name}", fix=_FIX, code="unsafe-pickle")
        return found


def read_pickle(raw: bytes, where: str) -> Any:
    """The value of a pickle; NumPy's scalars become Python numbers."""
    value = _Unpickler(_checked_pickle(raw, where), where).load()
    return value.items if isinstance(value, _Array) else value


def _checked_pickle(raw: bytes, where: str) -> bytes:
    """The pickle without frames, whose opcodes are known to be harmless.

    Opcodes that create other objects are refused, and uses of the memo that need unbounded memory or time. Frames only
    speed up reading. With nested frames, the unpickler would execute other opcodes than those that are verified here.
    """
    tuples: set[Any] = set()
    kept: list[bytes] = []
    previous, count, begin = "", 0, 0
    for opcode, argument, position in pickletools.genops(raw):
        name = opcode.name
        if name == "FRAME" and position is not None:
            kept.append(raw[begin:position])
            begin = position + _FRAME_BYTES
            continue
        wrong = name if name in _REFUSED else ""
        if name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            index = count if argument is None else argument
            count += 1
            if index > len(raw):  # the memo is a list: a large index allocates as many entries
                wrong = f"{name} {index}"
            if previous.startswith("TUPLE"):
                tuples.add(index)
        elif name in ("GET", "BINGET", "LONG_BINGET") and argument in tuples:
            wrong = f"{name} of a tuple"  # the hash of a tuple of shared tuples takes exponential time
        if wrong:
            what = "the pickle does more than hold data"
            raise BitwrightError(what, where=where, value=wrong, fix=_FIX, code="unsafe-pickle")
        previous = name
    return b"".join([*kept, raw[begin:]])


def load_npy(path: str | Path) -> Any:
    """The content of an .npy file. An object array without axes gives its only value."""
    try:
        return _load(Path(path))
    except BitwrightError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors, in NumPy and in pickle
        text = " ".join(str(error).split()) or type(error).__name__
        fix = "give a file that numpy.save wrote"
        raise BitwrightError(f"can't be read: {text[:200]}", where=str(path), fix=fix, code="damaged-file") from error


def _load(path: Path) -> Any:
    raw = read_bytes(path, what="the mapper", fix="give a file that numpy.save wrote", most=_MOST_BYTES)
    if raw[:1] == b"\x80":  # a plain pickle
        return read_pickle(raw, str(path))
    with io.BytesIO(raw) as file:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
        if not dtype.hasobject:
            if prod(shape) * dtype.itemsize > len(raw):
                raise ValueError(f"the shape {shape} needs more numbers than the file has")
            file.seek(0)
            return np.load(file, allow_pickle=False)
        value = read_pickle(file.read(), str(path))
    return value[0] if prod(shape) == 1 and isinstance(value, list) and len(value) == 1 else _rows(value, shape)


def _rows(value: Any, shape: tuple[int, ...]) -> Any:
    """The rows of a table, which a pickle stores one after the other."""
    if len(shape) != 2 or not isinstance(value, list) or len(value) != prod(shape):
        return value
    return [value[start : start + shape[1]] for start in range(0, len(value), shape[1])]
