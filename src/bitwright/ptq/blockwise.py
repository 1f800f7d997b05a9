"""Quantize a Hugging Face folder block by block: only one block's weights are in memory at a time.

Weights are read from safetensors files when their block runs, and the quantized block is written to a folder that
transformers and vLLM load (compressed-tensors). A run that was interrupted, also by kill -9, resumes after the last
finished block.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.backends import DEFAULT_BACKEND, Choices, make_plan, plan_warnings, resolve_for_backend
from bitwright.backends import backend as find_backend
from bitwright.core.arguments import Amount, Seed, strict
from bitwright.core.display import Progress, Summarized, Table
from bitwright.core.documents import read_json, read_tensors
from bitwright.core.errors import BitwrightError, PlanError, Problem, WorkloadError, log_warnings
from bitwright.core.files import file_fingerprint, fingerprint, replacing, write_text
from bitwright.core.formats import Format
from bitwright.core.interrupts import resumable, safe_point, uninterrupted
from bitwright.core.output_folder import locked, staged_output
from bitwright.deployment.artefacts.compressed_tensors import PACKED, CompressedTensors, quantization_config, stored
from bitwright.deployment.artefacts.weights import IntegerWeight, integer_weights
from bitwright.graph import Graph, capture
from bitwright.plan import Plan
from bitwright.ptq.on_demand import OnDemandModel
from bitwright.ptq.quantize import quantize
from bitwright.ptq.step import MEMORY, Step, read_steps
from bitwright.quantizers import attachment_of, find_attachment, prepare, strip
from bitwright.workload.language_models import (
    TextModel,
    is_language_model,
    next_token_loss,
    text_samples,
    with_text,
)

__all__ = ["QuantizedFolder", "quantize_folder"]

_STATE = ".blocks"
_PROGRESS = "progress.json"
_WHOLE = ("rotate",)
"""Steps that change all blocks together."""


@strict
@dataclass(frozen=True, kw_only=True)
class QuantizedFolder(Summarized):
    """A folder of integer weights that `AutoModelForCausalLM.from_pretrained` loads.

    >>> import tempfile, bitwright
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    >>> folder = tempfile.mkdtemp()
    >>> LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    >>> made = bitwright.quantize_folder(f"hf:{folder}", folder + "/int4", group=32)
    >>> made.bytes < made.float_bytes
    True
    """

    folder: Path
    plan: Plan
    bytes: int
    """Size of the weight files."""
    float_bytes: int
    """Size of the weights in the source folder."""
    perplexity: float | None = None
    """Perplexity of the quantized model on the text; None: no text was given."""
    float_perplexity: float | None = None
    warnings: tuple[Problem, ...] = ()

    def __repr__(self) -> str:
        measured = "" if self.perplexity is None else f", perplexity {self.perplexity:.2f}"
        sizes = f"{self.float_bytes / 1e6:.1f} MB -> {self.bytes / 1e6:.1f} MB"
        return f"<QuantizedFolder {self.folder.name}: {sizes}{measured}>"

    def summary(self) -> Iterator[Table | str]:
        """Sizes, perplexities, warnings and the plan."""
        rows: list[tuple[str, object]] = [
            ("float weights", f"{self.float_bytes / 1e6:.1f} MB"),
            ("quantized weights", f"{self.bytes / 1e6:.1f} MB"),
        ]
        if self.perplexity is not None and self.float_perplexity is not None:
            rows.append(("perplexity", f"{self.perplexity:.2f} (float {self.float_perplexity:.2f})"))
        rows += [("warning", f"{one.what}. {one.fix or ''}") for one in self.warnings]
        yield Table(["", ""], rows, title=repr(self)[1:-1])
        yield from self.plan.summary()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data."""
        plain = {**vars(self), "folder": str(self.folder), "plan": self.plan.to_dict()}
        return {**plain, "warnings": [asdict(one) for one in self.warnings]}


@strict
def quantize_folder(
    source: str | Path,
    output: str | Path,
    precision: str | None = None,
    *,
    backend: str | None = None,
    plan: Plan | None = None,
    samples: int | None = None,
    steps: Sequence[str | Step] = (),
    seed: Seed = 0,
    memory: Amount = MEMORY,
    progress: Progress | None = None,
    **choices: Unpack[Choices],
) -> QuantizedFolder:
    """Quantize the weights of a Hugging Face folder with one block in memory at a time.

    `source` is a folder or a reference such as `hf:FOLDER,text=wiki.txt`. The result is a folder in the format
    compressed-tensors. Memory is needed for the largest block, the activations between two blocks, and at most `memory`
    MiB of activations within a block. `steps` (gptq, awq, imatrix, signround, …) run on each block, on what the
    quantized blocks before it compute from the text. Without steps, no text is needed. Perplexity is measured in the
    same pass if there is a text. Rerun an interrupted call with the same arguments to resume.

    The default `precision` is w4a16. Other arguments are those of `bitwright.quantize`.

    >>> import tempfile, bitwright
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    >>> folder = tempfile.mkdtemp()
    >>> LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    >>> made = bitwright.quantize_folder(f"hf:{folder}", folder + "/int4", group=32)
    >>> made.bytes < made.float_bytes
    True
    """
    if precision is None and plan is None and not choices.get("weights"):
        precision = "w4a16"
    reference = source if isinstance(source, str) and is_language_model(source) else f"hf:{source}"
    wanted = TextModel.parse(with_text(reference, samples=samples))
    if wanted.scheme != "hf":
        raise WorkloadError(
            "only Hugging Face folders can be read block by block",
            value=str(source),
            fix="load the file and save it with model.save_pretrained(folder), then give hf:folder",
            code="not-a-folder",
        )
    wanted.require_model()
    found = read_steps(steps)
    _refuse_steps(found, wanted)
    output = Path(output)
    state = output / _STATE
    with locked(output), resumable(lambda: f"finished blocks are kept in {state}; rerun to resume"):
        run = _Run(wanted, state, found, seed=seed, memory=memory, progress=progress)
        run.make_plan(precision, backend, plan, choices)
        run.open_state()
        run.blocks()
        made = run.finish(output)
    shutil.rmtree(state, ignore_errors=True)
    return made


def _refuse_steps(steps: Sequence[Step], wanted: TextModel) -> None:
    problems = [
        Problem(
            what="this step changes all blocks together",
            where="steps",
            value=step.name,
            fix="quantize the whole model in memory (without --blockwise)",
            code="not-blockwise",
        )
        for step in steps
        if step.name in _WHOLE
    ]
    if steps and wanted.text is None:
        fix = "give a text file: hf:FOLDER,text=FILE"
        problems.append(Problem(what="steps need a text to calibrate with", where="text", fix=fix, code="no-text"))
    if problems:
        raise PlanError(problems)


class _Stop(Exception):
    """A block was reached."""


class _Run:
    """One run, from the plan to the folder."""

    def __init__(
        self, wanted: TextModel, state: Path, steps: list[Step], *, seed: int, memory: int, progress: Progress | None
    ) -> None:
        self.wanted, self.state, self.steps = wanted, state, steps
        self.seed, self.memory, self.progress = seed, memory, progress
        self.own = OnDemandModel(wanted.path)
        self.model = self.own.model
        self.evaluated: list[Tensor] = []
        self.calibrated: list[Tensor] = []
        if wanted.text is not None:
            samples = text_samples(wanted, self.model)
            held = min(wanted.samples, len(samples) // 2)
            self.evaluated = list(samples[:held].split(wanted.batch))
            self.calibrated = list(samples[held : held + wanted.samples].split(wanted.batch)) if steps else []
        self.warnings: tuple[Problem, ...] = ()
        self.done: list[dict[str, Any]] = []
        self.kept: dict[str, str] = {}  # file of the state → fingerprint
        self.hidden: dict[str, list[Tensor]] = {}

    def make_plan(self, precision: str | None, backend: str | None, plan: Plan | None, choices: Choices) -> None:
        """Record one call, choose formats, and leave in float what the folder can't store, with the reason."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = torch.randint(vocabulary, (1, 8), generator=torch.Generator().manual_seed(0))
        with self.own.on_demand(), _chained(self.own.blocks):
            graph = capture(self.model, {"input_ids": ids})
        if plan is None:
            target = backend or DEFAULT_BACKEND
            made = make_plan(graph, target, model=self.wanted.path.resolve().name, precision=precision, **choices)
        else:
            target = backend or plan.backend or DEFAULT_BACKEND
            made = resolve_for_backend(plan, find_backend(target), graph, name=plan.model)
        self.warnings = plan_warnings(graph, made)
        log_warnings(self.warnings)
        self.plan = self._storable(made, graph)

    def _storable(self, plan: Plan, graph: Graph) -> Plan:
        prepare(self.model, plan, graph=graph)
        if find_attachment(self.model) is None:
            raise PlanError([Problem(what="the plan quantizes nothing", code="nothing-to-quantize")])
        attachment = attachment_of(self.model)
        activations = [site for site, q in attachment.quantizers.items() if not q.weight]
        problems = _BlockFiles().problems(self.model)
        strip(self.model)
        if activations:
            raise PlanError(
                [
                    Problem(
                        what="only weights can be quantized block by block",
                        where=activations[0],
                        fix="use a precision such as w4a16, or quantize the whole model (without --blockwise)",
                        code="not-blockwise",
                    )
                ]
            )
        floats = dict(plan.float)
        for problem in problems:
            assert problem.where is not None
            floats[problem.where.rpartition(":")[0]] = problem.what
        refused = {problem.where for problem in problems}
        sites = {s: spec for s, spec in plan.sites.items() if s not in refused and spec.share not in refused}
        if not any(spec.quantizes for spec in sites.values()):
            raise PlanError(problems, title="no weight of this plan can be stored")
        return replace(plan, sites=sites, float=floats)

    # -- state -------------------------------------------------------------------------------------------------

    def open_state(self) -> None:
        """Read the progress of an interrupted run with the same settings."""
        sizes = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in self.own.files.paths]
        self.identity = {
            "weights": fingerprint(json.dumps(sizes)),
            "plan": fingerprint(self.plan.to_yaml()),
            "steps": [f"{step.name} {step.model_dump_json()}" for step in self.steps],
            "seed": self.seed,
            "text": fingerprint(*self.evaluated, *self.calibrated) if self.evaluated else None,
        }
        file = self.state / _PROGRESS
        self.state.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            return
        known = read_json(file, what="the progress of this run")
        if not isinstance(known, dict) or known.get("identity") != self.identity:
            raise PlanError(
                [
                    Problem(
                        what="the folder contains an unfinished run with other settings",
                        where=str(self.state),
                        fix=f"use the same settings, or remove {self.state} to start over",
                        code="resume-mismatch",
                    )
                ]
            )
        for name, expected in known["files"].items():
            if not (self.state / name).is_file() or file_fingerprint(self.state / name) != expected:
                raise WorkloadError(
                    "can't resume: a file was changed after it was saved",
                    where=str(self.state / name),
                    fix=f"remove {self.state} to start over",
                    code="resume-damaged",
                )
        self.done, self.kept = known["done"], known["files"]
        self._read_hidden()

    def _read_hidden(self) -> None:
        name = f"hidden-{len(self.done):05d}.safetensors"
        if name in self.kept:
            tensors = read_tensors(self.state / name, fix=f"remove {self.state}", what="saved activations")
            for key in sorted(tensors):
                self.hidden.setdefault(key.partition(" ")[0], []).append(tensors[key])

    def _save(self, path: str, tensors: dict[str, Tensor], weights: list[IntegerWeight]) -> None:
        """Write a unit, the activations behind it, and then the progress; the process may be killed in between."""
        number = len(self.done) + 1
        shard, hidden = f"unit-{number:05d}.safetensors", f"hidden-{number:05d}.safetensors"
        entries = [{"module": w.module, "format": str(w.format), "shape": list(w.codes.shape)} for w in weights]
        held = {f"{kind} {i:06d}": t for kind, ts in self.hidden.items() for i, t in enumerate(ts)}
        written = {shard: tensors, **({hidden: held} if held else {})}
        with uninterrupted():
            for name, content in written.items():
                with replacing(self.state / name, needed=_size(content)) as temporary:
                    save_file(content, temporary, metadata={"format": "pt"})
            self.done.append({"unit": path, "shard": shard, "weights": entries})
            self.kept = {name: text for name, text in self.kept.items() if not name.startswith("hidden-")}
            self.kept |= {name: file_fingerprint(self.state / name) for name in written}
            known = {"identity": self.identity, "done": self.done, "files": self.kept}
            write_text(self.state / _PROGRESS, json.dumps(known) + "\n")
            for old in self.state.glob("hidden-*.safetensors"):
                if old.name != hidden:
                    old.unlink()

    # -- blocks ------------------------------------------------------------------------------------------------

    def blocks(self) -> None:
        """Quantize and write every unit: first the blocks, in order, then the other modules."""
        units = [*self.own.blocks, *(path for path in self.own.units if path not in self.own.blocks)]
        for number, path in enumerate(units):
            if number < len(self.done):
                continue
            safe_point()
            if self.progress is not None:
                self.progress(number, len(units), f"quantizing {path}")
            self.own.load(path)
            self.own.held = {path}
            try:
                weights, tensors = self._quantized(path, block=path in self.own.blocks)
            finally:
                self.own.held = set()
                self.own.drop(path)
            self._save(path, tensors, weights)

    @torch.no_grad()
    def _quantized(self, path: str, *, block: bool) -> tuple[list[IntegerWeight], dict[str, Tensor]]:
        calls = self._calls(path) if block else {}
        module = self.own.units[path]
        if "float" in calls:
            self.hidden["float"] = [_first(module(**call)) for call in calls["float"]]
        sites = {s: spec for s, spec in self.plan.sites.items() if _within(s, path)}
        if block and self.steps and sites:
            part = Plan(sites={_relative(s, path): spec for s, spec in sites.items()}, backend=self.plan.backend)
            part = replace(part, float={_relative(n, path): w for n, w in self.plan.float.items() if _within(n, path)})
            batches = calls["calibration"]
            settings: dict[str, Any] = {"steps": self.steps, "seed": self.seed, "memory": self.memory}
            with torch.enable_grad():  # for steps that learn
                quantize(module, batches, plan=part, measure=False, **settings)
        else:
            part = Plan(sites=sites)
            prepare(self.model, part)
            _set_ranges(self.model)
        root, prefix = (module, f"{path}.") if block and self.steps and sites else (self.model, "")
        weights = self._codes(root, prefix)
        for kind in [kind for kind in calls if kind != "float"]:
            self.hidden[kind] = [_first(module(**call)) for call in calls[kind]]
        if find_attachment(root) is not None:
            strip(root)
        return weights, self._tensors(path, weights)

    def _codes(self, root: nn.Module, prefix: str) -> list[IntegerWeight]:
        if find_attachment(root) is None:
            return []
        for site, quantizer in attachment_of(root).quantizers.items():  # as they are stored
            dtype = self._dtype(prefix + site.rpartition(":")[0])
            grid = quantizer.grid()
            quantizer.set_grid(replace(grid, scale=grid.scale.to(dtype).float()))
        found = integer_weights(root)
        return [replace(w, site=prefix + w.site, module=prefix + w.module) for w in found]

    def _dtype(self, module: str) -> torch.dtype:
        name = self.own.stored[f"{module}.weight"]
        assert name is not None
        return self.own.files.dtype(name)

    def _tensors(self, path: str, weights: list[IntegerWeight]) -> dict[str, Tensor]:
        """The tensors of a unit as they are stored: other tensors than integer weights keep their dtype."""
        found: dict[str, Tensor] = {}
        for weight in weights:
            parts = stored(weight, self._dtype(weight.module))
            found |= {f"{weight.module}.{name}": tensor for name, tensor in parts.items()}
        integer = {f"{weight.module}.weight" for weight in weights}
        for name, parameter in self.own.units[path].named_parameters(recurse=path in self.own.blocks):
            full = f"{path}.{name}" if path else name
            known = self.own.stored.get(full)
            if known is not None and full not in integer:
                found[known] = parameter.detach().to(self.own.files.dtype(known)).contiguous()
        return found

    def _calls(self, path: str) -> dict[str, list[dict[str, Any]]]:
        """The calls of a block on all data: arguments from the model's own code, and the hidden states before it."""
        before = list(self.own.blocks)[: list(self.own.blocks).index(path)]
        found: dict[str, list[dict[str, Any]]] = {}
        sources = {"calibration": self.calibrated, "float": self.evaluated, "quantized": self.evaluated}
        block = self.own.units[path]
        signature = inspect.signature(type(block).forward)
        with self.own.on_demand(), self._embeddings():
            for kind, batches in sources.items():
                for index, ids in enumerate(batches):
                    hidden = self.hidden[kind][index] if before else None
                    seen: list[dict[str, Any]] = []

                    def reach(*args: Any, seen: list[dict[str, Any]] = seen, **kwargs: Any) -> Any:
                        seen.append(_arguments(signature, block, args, kwargs))
                        raise _Stop

                    skip = {} if hidden is None else {one: partial(_passing, hidden) for one in before}
                    with self.own.replaced({**skip, path: reach}), suppress(_Stop):
                        self.model(input_ids=ids)
                    call = seen[0]
                    if hidden is not None:
                        call[next(iter(call))] = hidden
                    found.setdefault(kind, []).append(call)
        return found

    @contextmanager
    def _embeddings(self) -> Iterator[None]:
        """Keep the weights of the modules in front of the blocks in memory."""
        paths = list(self.own.units)
        front = paths[: paths.index(next(iter(self.own.blocks)))]
        before = set(self.own.held)
        for path in front:
            self.own.load(path)
        self.own.held = before | set(front)
        try:
            yield
        finally:
            self.own.held = before
            for path in front:
                self.own.drop(path)

    # -- result ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _perplexity(self, kind: str) -> float | None:
        """The perplexity of the text; the quantized head is the one that was written."""
        if not self.evaluated:
            return None
        total, count = 0.0, 0
        rear = {s: spec for s, spec in self.plan.sites.items() if not any(_within(s, b) for b in self.own.blocks)}
        if kind == "quantized" and rear:
            prepare(self.model, Plan(sites=rear))
            for path in self.own.units:
                if any(_within(site, path) for site in rear):
                    self.own.load(path)
            _set_ranges(self.model)
            self._codes(self.model, "")
            for path in self.own.units:
                self.own.drop(path)
            for quantizer in attachment_of(self.model).quantizers.values():
                quantizer.tracked.forget()
        with self.own.on_demand():
            for ids, hidden in zip(self.evaluated, self.hidden[kind], strict=True):
                with self.own.replaced({path: partial(_passing, hidden) for path in self.own.blocks}):
                    loss = next_token_loss(self.model(input_ids=ids), ids)
                tokens = ids.numel() - len(ids)
                total, count = total + float(loss) * tokens, count + tokens
        if find_attachment(self.model) is not None:
            strip(self.model)
        return exp(total / count)

    def finish(self, output: Path) -> QuantizedFolder:
        """Collect the units in a folder that transformers loads."""
        measured = {kind: self._perplexity(kind) for kind in ("float", "quantized")}
        count = len(self.done)
        names = {u["shard"]: f"model-{n:05d}-of-{count:05d}.safetensors" for n, u in enumerate(self.done, 1)}
        with staged_output(output) as staged:
            for file in self.wanted.path.iterdir():
                weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack")
                if file.is_file() and not weights and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, staged / file.name)
            config = json.loads((self.wanted.path / "config.json").read_text(encoding="utf-8"))
            config["quantization_config"] = quantization_config(self.model, self._formats(), {})
            write_text(staged / "config.json", json.dumps(config, indent=2) + "\n")
            where: dict[str, str] = {}
            for old, new in names.items():
                try:
                    os.link(self.state / old, staged / new)
                except OSError:  # a file system without links
                    shutil.copyfile(self.state / old, staged / new)
                where |= dict.fromkeys(_tensor_names(staged / new), new)
            size = sum((staged / new).stat().st_size for new in names.values())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            write_text(staged / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
            self.plan.save(staged / "plan.yaml")
            made = QuantizedFolder(
                folder=output,
                plan=self.plan,
                bytes=size,
                float_bytes=self.own.files.bytes,
                perplexity=measured["quantized"],
                float_perplexity=measured["float"],
                warnings=self.warnings,
            )
            write_text(staged / "quantization.json", json.dumps(made.to_dict(), indent=1) + "\n")
        return made

    def _formats(self) -> list[tuple[str, dict[str, Format]]]:
        """The layers that were written, grouped by format."""
        found: dict[str, dict[str, Format]] = {}
        for unit in self.done:
            for entry in unit["weights"]:
                found.setdefault(entry["format"], {})[entry["module"]] = Format.parse(entry["format"])
        return [(PACKED, members) for members in found.values()]


class _BlockFiles(CompressedTensors):
    """The files of the folder. A head that is tied to the embedding has no weight of its own to read."""

    unties = False


def _tensor_names(path: Path) -> list[str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in header if name != "__metadata__"]


@torch.no_grad()
def _set_ranges(model: nn.Module) -> None:
    """Set the ranges of weights that are in memory from their values."""
    if find_attachment(model) is None:
        return
    for site, quantizer in attachment_of(model).quantizers.items():
        weight = model.get_parameter(site.replace(":", "."))
        quantizer.observing = True
        quantizer.observe(weight)
        quantizer.observing = False
        quantizer.update_grid()


@contextmanager
def _chained(blocks: dict[str, nn.Module]) -> Iterator[None]:
    """Verify that each block reads what the block before it returns."""
    last: list[Tensor] = []
    wrong: list[str] = []

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            first = next(iter(_arguments(inspect.signature(type(module).forward), module, args, kwargs).values()), None)
            if last and (not isinstance(first, Tensor) or not torch.equal(first, last[0])):
                wrong.append(path)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            last[:] = [_first(output).clone()]

    with ExitStack() as stack:
        for path, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        yield
    if wrong:
        raise BitwrightError(
            "the blocks of this model aren't a chain: a block reads more than the result of the block before it",
            where=wrong[0],
            fix="quantize the whole model in memory (without --blockwise)",
            code="not-blockwise",
        )


def _arguments(signature: inspect.Signature, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, without caches."""
    bound = dict(signature.bind(module, *args, **kwargs).arguments)
    bound.pop(next(iter(bound)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound


def _passing(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


def _first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found.detach()


def _within(name: str, path: str) -> bool:
    """Whether an operator or a site belongs to a module."""
    return name.startswith(path) and name[len(path) : len(path) + 1] in ("", ".", "/", ":", "#")


def _relative(name: str, path: str) -> str:
    return name.removeprefix(path).removeprefix(".")


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
