"""`prepare(model, plan)` attaches quantizers to a model, `strip(model)` removes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.core.registry import KERNELS, QUANTIZERS
from bitwright.graph import Graph, Op, capture
from bitwright.graph.graph import SiteName, primary_kind, site_name
from bitwright.graph.interception import ForwardShim, bare, follow_checkpoints, install, uninstall
from bitwright.graph.operators import EXPERT_WEIGHTS, PRODUCTS, channel_axis, reduction_axis
from bitwright.plan import ComputeSpec, FoldSpec, Plan, SiteSpec
from bitwright.quantizers.attachment import CONTAINER, Alias, Attachment, Container, OpHooks
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.folding import make_fold
from bitwright.quantizers.grid import Layout

_Model = TypeVar("_Model", bound=nn.Module)
QuantizationMode = Literal["float", "calibrate", "quantize"]


@strict
def prepare(
    model: _Model, plan: Plan, *, inputs: Any = None, graph: Graph | None = None, simulate: bool = False
) -> _Model:
    """Attach the plan's quantizers to `model`, in place, and return it.

    The class, forward signature and float state-dict keys stay the same. Quantizer state has keys `bitwright.<site>.…`.
    A plan with patterns needs a `graph`, or `inputs` to record one. A prepared model can run in one thread at a time.
    Calibration sets the shapes of learnable scales, so create the optimizer afterwards. Operators in the plan's
    `compute` section run in low precision or, with `simulate`, in float with the same rounding.

    >>> import torch
    >>> from bitwright import Plan, calibrate, prepare
    >>> plan = Plan.from_yaml("{bitwright: 1, sites: {'*:weight': int8/channel/sym}}")
    >>> model = prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)), plan, inputs=torch.ones(1, 8))
    >>> calibrate(model, [torch.randn(16, 8)])  # returns the number of batches
    1
    >>> model(torch.ones(1, 8)).shape
    torch.Size([1, 4])
    """
    model = bare(model)  # type: ignore[assignment]  # without torch.compile's wrapper
    if find_attachment(model) is not None:
        raise BitwrightError("the model is already prepared", fix="call strip(model) first", code="already-prepared")
    if hasattr(model, CONTAINER):
        raise BitwrightError(
            f"the model already has an attribute {CONTAINER!r}",
            value=type(model).__name__,
            fix="rename it",
            code="name-in-use",
        )
    if graph is None and inputs is not None:
        graph = capture(model, inputs)
    if plan.has_patterns and graph is None:
        raise BitwrightError(
            "the plan has patterns, which need a recorded graph",
            fix="prepare(model, plan, inputs=example_batch), or plan.resolve(graph)",
            code="unresolved-patterns",
        )
    plan = plan.resolve(graph) if graph is not None else plan
    problems = plan.validate() if graph is None else []
    builder = _Builder(model, plan, graph, skip={problem.where for problem in problems}, simulate=simulate)
    problems += builder.problems
    if problems:
        raise PlanError(problems)
    attachment = builder.attachment
    if not attachment.quantizers and not attachment.kernels:
        return model  # an all-float plan needs no attachment
    container = Container(attachment)
    for site, quantizer in attachment.quantizers.items():
        container.add(site, quantizer)
    follow_checkpoints()
    install(model, attachment, builder.paths())
    attachment.root = model.__dict__["forward"]
    for fold in attachment.folds.values():
        fold.attached()
        if type(fold.norm).forward is nn.SyncBatchNorm.forward:
            # Its kernels are one autograd function that modes can't intercept, and on a CPU it can't train. The forward
            # of its base class calls one operator, which the fold replaces.
            fold.norm.__dict__["forward"].stand_in = nn.modules.batchnorm._BatchNorm
    model._modules[CONTAINER] = container
    container.to(next((p.device for p in model.parameters()), "cpu"))
    container.train(model.training)
    return model


@strict
def strip(model: _Model) -> _Model:
    """Remove all quantizers from `model`, in place, and return the float model.

    >>> import torch
    >>> from bitwright import quantize, strip
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> quantized = quantize(model, [torch.randn(16, 8)])
    >>> list(strip(model).state_dict())
    ['0.weight', '0.bias']
    """
    model = bare(model)  # type: ignore[assignment]
    attachment = find_attachment(model)
    if attachment is not None:
        unwrap_forward(model)
        uninstall(model, attachment)
        for fold in attachment.folds.values():
            fold.detached()
        del model._modules[CONTAINER]
    return model


def find_attachment(model: nn.Module) -> Attachment | None:
    """The attached state of a prepared model, or None."""
    children = bare(model)._modules
    container = children[CONTAINER] if CONTAINER in children else None  # noqa: SIM401  # torch.jit's have no `get`
    return container.attachment if isinstance(container, Container) else None


def unwrap_forward(model: nn.Module) -> None:
    """Remove a trainer's wrapper (such as Accelerate's autocast) around a prepared model's forward."""
    root = attachment_of(model).root
    wrapped: Any = model.__dict__.get("forward")
    while wrapped is not None and not isinstance(wrapped, ForwardShim):
        wrapped = getattr(wrapped, "__wrapped__", None) or getattr(wrapped, "__func__", None)
    if wrapped is root and root is not None:
        model.__dict__["forward"] = root
        model.__dict__.pop("_original_forward", None)


def replaced_modules(model: nn.Module) -> list[str]:
    """Paths of modules that were replaced after `prepare`: their operators would not be intercepted."""
    attachment = attachment_of(model)
    modules = dict(model.named_modules())
    return [path for path in attachment.tables if path and not _is_ours(modules.get(path), attachment)]


def _is_ours(module: nn.Module | None, attachment: Attachment) -> bool:
    shim: Any = None if module is None else module.__dict__.get("forward")
    while shim is not None and not (isinstance(shim, ForwardShim) and shim.interceptor is attachment):
        shim = shim.inner if isinstance(shim, ForwardShim) else getattr(shim, "__wrapped__", None)
    return shim is not None and shim.module is module


def attachment_of(model: nn.Module) -> Attachment:
    """The attached state. Raises an error for a model that isn't prepared."""
    attachment = find_attachment(model)
    if attachment is None:
        raise BitwrightError(
            "this model isn't prepared",
            value=type(model).__name__,
            fix="call prepare(model, plan) first",
            code="not-prepared",
        )
    return attachment


@strict
def quantizers_of(model: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers of a prepared model by site.

    >>> import torch
    >>> from bitwright import quantize, quantizers_of
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> quantized = quantize(model, [torch.randn(16, 8)])
    >>> quantizers_of(model)["0:weight"].scale.shape
    torch.Size([4])
    """
    return dict(attachment_of(model).quantizers)


@strict
def set_mode(model: nn.Module, mode: QuantizationMode) -> None:
    """Set what the quantizers of a prepared model do.

    In mode `float` the model computes as if it were not prepared. In mode `calibrate` observers record ranges, and
    nothing is quantized. Mode `quantize` is the normal one.

    >>> import torch
    >>> from bitwright import quantize, set_mode
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> inputs = torch.randn(16, 8)
    >>> expected = model(inputs)
    >>> quantized = quantize(model, [inputs])
    >>> set_mode(model, "float")
    >>> torch.equal(model(inputs), expected)
    True
    """
    attachment = attachment_of(model)
    if mode not in get_args(QuantizationMode):
        raise BitwrightError(
            "unknown mode", value=mode, fix=did_you_mean(mode, get_args(QuantizationMode)), code="unknown-mode"
        )
    attachment.enabled = mode != "float"
    for quantizer in attachment.quantizers.values():
        quantizer.observing = mode == "calibrate"
        quantizer.enabled = mode == "quantize"


@strict
def compile_arithmetic(model: nn.Module, on: bool = True) -> None:
    """Run the quantizers of a prepared model in compiled code, without compiling the model.

    Use it for training and long evaluations: the first steps take some seconds longer, the following steps are much
    faster. The results don't change. Without a working compiler, a warning is logged and the speed stays the same. It
    has no effect if the complete model is compiled with `torch.compile`.

    >>> import torch
    >>> from bitwright import compile_arithmetic, quantize, quantizers_of
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> quantized = quantize(model, [torch.randn(16, 8)])
    >>> compile_arithmetic(model)
    >>> all(quantizer.compiled for quantizer in quantizers_of(model).values())
    True
    """
    for quantizer in attachment_of(model).quantizers.values():
        quantizer.compiled = on


@contextmanager
def in_mode(model: nn.Module, mode: QuantizationMode) -> Iterator[None]:
    """`set_mode` within this block."""
    attachment = attachment_of(model)
    before = (attachment.enabled, [(q, q.observing, q.enabled) for q in attachment.quantizers.values()])
    set_mode(model, mode)
    try:
        yield
    finally:
        attachment.enabled = before[0]
        for quantizer, observing, enabled in before[1]:
            quantizer.observing, quantizer.enabled = observing, enabled


@contextmanager
def weights_may_change(model: nn.Module) -> Iterator[None]:
    """Allow weights to change in this block. On exit, the ranges are associated with the new weights."""
    attachment = attachment_of(model)
    attachment.watching = False
    try:
        yield
    finally:
        attachment.watching = True
        for quantizer in attachment.quantizers.values():
            quantizer.tracked.refresh()


def warnings_of(model: nn.Module) -> tuple[Problem, ...]:
    """Warnings from running a prepared model: operators without quantizers, weights that were not calibrated."""
    return tuple(attachment_of(model).warnings.values())


@contextmanager
def folded_once(model: nn.Module) -> Iterator[None]:
    """Fold norms only in the first forward of this block. Weights must not change and must not be quantized."""
    folds = attachment_of(model).folds.values()
    for fold in folds:
        fold.holding = True
    try:
        yield
    finally:
        for fold in folds:
            fold.holding, fold.held = False, None


@contextmanager
def tapped(model: nn.Module, look: Callable[[str, Quantizer, Tensor], None]) -> Iterator[None]:
    """Call `look(site, quantizer, x)` for every input of a quantizer in this block."""
    attachment = attachment_of(model)
    for quantizer in attachment.quantizers.values():
        quantizer.tap = look
    try:
        yield
    finally:
        for quantizer in attachment.quantizers.values():
            quantizer.tap = None


class _Builder:
    """Converts a plan with exact sites to hook tables and collects all problems."""

    def __init__(
        self, model: nn.Module, plan: Plan, graph: Graph | None, skip: set[str | None], *, simulate: bool
    ) -> None:
        self.attachment = Attachment(plan)
        self.modules = dict(model.named_modules())
        self.problems: list[Problem] = []
        self.refused: set[str] = set()
        self.sites = {site: spec for site, spec in plan.sites.items() if site not in skip}
        specs = [(site, spec) for site, spec in self.sites.items() if spec.quantizes]
        for site, spec in specs:
            if spec.share is None:
                self._add(site, spec)
        for site, spec in specs:
            if spec.share is not None and spec.share in self.attachment.quantizers:
                self.attachment.shared[site] = spec.share
                self._hook(site, Alias(self.attachment.quantizers[spec.share], site))
        for quantizer in self.attachment.quantizers.values():
            self._link(quantizer)
        for norm, fold in plan.folds.items():
            if f"fold.{norm}" not in skip:
                self._fold(norm, fold)
        for name, compute in plan.compute.items():
            if compute.is_low_precision and not any(str(where).startswith(f"compute.{name}") for where in skip):
                self._kernel(name, compute, simulate)
        self._count_calls(graph)
        self._repeat_weights()
        self.unseen: set[str] = set()
        if graph is not None:
            self._find_experts(graph)
            self._count_recorded(graph)

    def _count_calls(self, graph: Graph | None) -> None:
        """Treat known calls (in the plan or the graph) without quantizers as float.

        Only calls beyond all known ones use the quantizers of the last one.
        """
        known = [(op.module, op.call) for op in graph.ops] if graph is not None else []
        idle = [SiteName.parse(site) for site, spec in self.sites.items() if not spec.quantizes]
        for path, call in [*known, *((name.path, name.call) for name in idle)]:
            calls = self.attachment.tables.get(path)
            while calls is not None and len(calls) <= call:
                calls.append({})

    def _count_recorded(self, graph: Graph) -> None:
        """Count the recorded operators per kind and location, to detect others, which would silently run in float."""
        recorded = self.attachment.recorded
        for op in graph.ops:
            if _counted_apart(op):
                continue
            calls = recorded.setdefault(op.module, [])
            while len(calls) <= op.call:
                calls.append({})
            calls[op.call][op.kind] = calls[op.call].get(op.kind, 0) + 1
        ran = {op.module for op in graph.ops}
        for path, module in self.modules.items():
            if path not in ran and any(True for _ in module.parameters(recurse=False)):
                recorded[path] = [{}]
                self.unseen.add(path)

    def _find_experts(self, graph: Graph) -> None:
        """Find modules that select weights of experts, and the operators of one iteration if they do so in a loop."""
        for name in graph.selections:
            op = graph.by_name[name]
            if op.module in self.attachment.experts or op.call:
                continue
            own = [o for o in graph.ops if o.module == op.module and not o.call and not _counted_apart(o)]
            own = own[own.index(op) :]
            again = [index for index, other in enumerate(own) if index and other.ports[:1] == op.ports[:1]]
            loop = own[: again[0]] if again else own
            self.attachment.experts[op.module] = Counter(other.kind for other in loop)

    def _repeat_weights(self) -> None:
        """Let later calls of a module use the same weight quantizer and fold."""
        for first, *later in self.attachment.tables.values():
            for kind, entries in first.items():
                for table in later:
                    for index, hooks in enumerate(entries):
                        if "weight" not in hooks.inputs and hooks.fold is None and hooks.folded is None:
                            continue
                        others = table.setdefault(kind, [])
                        while len(others) <= index:
                            others.append(OpHooks())
                        if "weight" in hooks.inputs:
                            others[index].inputs.setdefault("weight", hooks.inputs["weight"])
                        others[index].fold = hooks.fold
                        others[index].folded = hooks.folded

    def _locate(self, site: str) -> tuple[SiteName, str] | None:
        name = SiteName.parse(site)
        if name.path not in self.modules:
            fix = did_you_mean(name.path, self.modules)
            self.problems.append(
                Problem(what="the model has no such module", where=site, value=name.path, fix=fix, code="unknown-site")
            )
            return None
        kind = name.kind or primary_kind(self.modules[name.path])
        if kind is None:
            self.problems.append(
                Problem(
                    what="this module doesn't have a primary operator",
                    where=site,
                    value=type(self.modules[name.path]).__name__,
                    fix=f"name the operator: {name.path}/linear#0:{name.port}",
                    code="unknown-site",
                )
            )
            return None
        return name, kind

    def _add(self, site: str, spec: SiteSpec) -> None:
        located = self._locate(site)
        if located is None:
            return
        name, kind = located
        format = spec.format
        axis = (channel_axis if format.granularity == "channel" else reduction_axis)(kind, name.port)
        selected = spec.axis is not None and format.granularity == "group"
        if spec.axis is not None and selected:
            axis = spec.axis
        try:
            quantizer: Quantizer = QUANTIZERS.get(spec.quantizer)(
                spec,
                site=site,
                kind=kind,
                port=name.port,
                layout=Layout(format.granularity, axis, format.group),
                weight=name.port in ("weight", "bias") or selected or (kind, name.port) in EXPERT_WEIGHTS,
                **spec.quantizer_options,
            )
        except TypeError as error:
            what = f"invalid options of the quantizer {spec.quantizer}: {error}"
            self.problems.append(
                Problem(what=what, where=site, value=dict(spec.quantizer_options), code="invalid-options")
            )
            return
        except BitwrightError as error:  # an unsupported format or an invalid option
            self.problems += error.problems
            self.refused.add(site)
            return
        self.attachment.quantizers[site] = quantizer
        self._hook(site, quantizer)

    def _link(self, quantizer: Quantizer) -> None:
        known = self.attachment.quantizers
        missing = [site for site in quantizer.of if site not in known]
        for site in (site for site in missing if site not in self.refused):  # already reported
            self.problems.append(
                Problem(
                    what="is derived from a site without a quantizer",
                    where=quantizer.site,
                    value=site,
                    fix=did_you_mean(site, known),
                    code="unknown-site",
                )
            )
        if not missing:
            quantizer.parts = tuple(known[site] for site in quantizer.of)

    def _hooks(self, name: SiteName, kind: str) -> OpHooks:
        calls = self.attachment.tables.setdefault(name.path, [])
        while len(calls) <= name.call:
            calls.append({})
        entries = calls[name.call].setdefault(kind, [])
        while len(entries) <= name.index:
            entries.append(OpHooks())
        return entries[name.index]

    def _hook(self, site: str, quantizer: Quantizer | Alias) -> None:
        located = self._locate(site)
        if located is None:
            return
        name, kind = located
        hooks = self._hooks(name, kind)
        if name.port == "output":
            hooks.output = quantizer
        else:
            hooks.inputs[name.port] = quantizer

    def _kernel(self, operator: str, spec: ComputeSpec, simulate: bool) -> None:
        located = self._locate(f"{operator}:input")
        if located is not None:
            kernel = KERNELS.get(spec.format)(spec, simulate=simulate)
            self._hooks(*located).kernel = kernel
            self.attachment.kernels[operator] = kernel

    def _fold(self, norm: str, spec: FoldSpec) -> None:
        located = self._locate(f"{norm}:input"), self._locate(f"{spec.into}:weight")
        if located[0] is None or located[1] is None:
            return
        (norm_name, norm_kind), (name, kind) = located[0], located[1]
        module = self.modules[norm_name.path]
        if norm_kind != "batch_norm" or getattr(module, "running_var", None) is None:
            self.problems.append(
                Problem(
                    what="only a batch norm with running statistics can be folded",
                    where=norm,
                    value=type(module).__name__,
                    fix="remove it from `fold`",
                    code="fold-not-possible",
                )
            )
            return
        fold = make_fold(spec, module, kind, site_name(spec.into, "bias"))
        self._hooks(norm_name, norm_kind).folded = fold
        self._hooks(name, kind).fold = fold
        self.attachment.folds[fold.site] = fold
        weight = self.attachment.quantizers.get(site_name(spec.into, "weight"))
        if weight is not None:
            weight.fold = fold

    def paths(self) -> set[str]:
        """Modules that need a shim: the root, modules with hooks and their descendants, and compiled modules.

        Modules with recorded products need one too: without it, their operators would count as their parent's.
        """
        recorded = self.attachment.recorded
        counted = {path for path, calls in recorded.items() if any(kind in PRODUCTS for call in calls for kind in call)}
        tables = self.attachment.tables
        owners = {*tables, *counted, *self.unseen}
        wanted = {"", *(path for path, module in self.modules.items() if bare(module) is not module)}
        for path in self.modules:  # parents come before their children
            if path in owners or "" in tables or (path.rpartition(".")[0] or None) in wanted:
                wanted.add(path)
        if "" not in owners:
            # The root has a shim, but not all of its descendants: their operators would be counted as its own.
            self.attachment.recorded.pop("", None)
        return wanted


def _counted_apart(op: Op) -> bool:
    """Whether the operator has no floating-point inputs."""
    return op.name.rpartition("/")[2].startswith(f"{op.kind}_int#")
