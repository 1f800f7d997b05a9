"""`check(model, artefact, batches)`: compare an artefact on the real runtime with the simulated model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.backends import DEFAULT_RUNTIME, backend
from bitwright.core.arguments import Count, strict
from bitwright.core.display import Summarized, Table
from bitwright.core.errors import ArtefactError, Problem, WorkloadError, log_warnings
from bitwright.core.formatting import counted, decibels, number, percent
from bitwright.core.registry import RUNTIMES
from bitwright.core.tensor_tree import as_array, as_call, call_copied, eval_mode, tensors_in
from bitwright.deployment.artefacts.base import QDQ, kind_of_artefact, read_artefact
from bitwright.deployment.decoder import SimulatedDecoder, cached_forward, is_decoder
from bitwright.deployment.distance import Distance, SiteDistance, distance_of, measure_sites
from bitwright.deployment.onnx_files import Damage
from bitwright.deployment.parity import (
    AgreementSums,
    GrowthProbe,
    OutputCheck,
    ProbeInfo,
    RoundingGrowth,
    SiteCheck,
    StoredSites,
    agreement_of,
    check_sites,
    refuse_nan,
)
from bitwright.deployment.runtimes.base import FOLDER, Runtime, artefact_file, open_runtime, readers
from bitwright.deployment.runtimes.decoding import DecoderSession
from bitwright.graph.capture import report_batch_errors
from bitwright.graph.interception import bare
from bitwright.quantizers import attachment_of, in_mode, warnings_of
from bitwright.workload.data import CalibrationData

_STEPS = 4  # tokens of a sample that are decoded one by one


@strict
@dataclass(frozen=True, kw_only=True)
class Check(Summarized):
    """How an artefact on a runtime compares with the simulated model, per output and, if asked for, per site.

    >>> import tempfile, torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     artefact = quantized.export(f"{folder}/model.onnx")
    ...     check = quantized.check(artefact.path, [x], per_site=True)
    >>> check.passed, [site.site for site in check.sites]
    (True, ['0:input', '0:weight', '0:bias'])
    """

    runtime: str
    samples: int
    outputs: tuple[OutputCheck, ...]
    sites: tuple[SiteCheck, ...] = ()
    unseen: tuple[str, ...] = ()
    """Sites without separate codes in the artefact, because their tensor is quantized at another site."""
    probe: ProbeInfo | None = None
    """How the codes at the sites were obtained."""
    distance: Distance | None = None
    """How far the simulated model is from the float model on the same data; `passed` doesn't depend on it."""
    warnings: tuple[Problem, ...] = ()
    """Problems that don't change the verdict. Each was also logged."""
    damages: tuple[Damage, ...] = ()
    """Values of the artefact that differ from the exported ones or from the model's."""
    rounding: RoundingGrowth | None = None
    """The comparison with the runtime's codes at each site, if an output didn't agree."""

    def __repr__(self) -> str:
        """One line: the verdict."""
        verdict = "passed" if self.passed else f"diverges at {self.first_divergence or 'the output'}"
        return f"<Check on {self.runtime}: {verdict}, {counted(self.samples, 'sample')}>"

    def to_dict(self) -> dict[str, Any]:
        """All fields and the verdict as plain data."""
        return {**asdict(self), "passed": self.passed, "first_divergence": self.first_divergence}

    @property
    def passed(self) -> bool:
        """Whether the artefact stores the model's values, and all outputs agree or only rounding differences grow."""
        intact = not self.damages and not any(site.damaged for site in self.sites)
        return intact and (all(output.passed for output in self.outputs) or self._only_rounding)

    @property
    def _only_rounding(self) -> bool:
        return self.rounding is not None and self.rounding.explains

    def summary(self) -> Iterator[Table | str]:
        """The verdict per output, the distance from float, and the sites if they were compared."""
        rows = [
            (
                one.name,
                "agrees" if one.passed else "rounding differs" if self._only_rounding else "diverges",
                decibels(one.sqnr_db),
                number(one.max_error),
                _agreement(one.top1_agreement),
            )
            for one in self.outputs
        ]
        title = f"{self.runtime}: {'passed' if self.passed else 'failed'}, {counted(self.samples, 'sample')}"
        yield Table(["output", "result", "#SQNR", "#largest error", "#same top-1"], rows, title=title)
        if self.distance is not None:
            heads = ["simulated against float", "#SQNR", "#same top-1"]
            outputs = self.distance.outputs
            yield Table(heads, [(one.name, decibels(one.sqnr_db), _agreement(one.top1_agreement)) for one in outputs])
        if self.sites:
            yield from self._site_summary()

    def failures(self) -> list[str]:
        """Damaged values of the artefact and the first site that diverges."""
        if self.passed:
            return []
        where = self.first_divergence or "no single site: only the output differs"
        damages = [f"the artefact differs from the model: {damage.site}: {damage.what}" for damage in self.damages]
        return [*damages, f"{self.runtime} diverges; first diverging site: {where}"]

    def _site_summary(self) -> Iterator[Table | str]:
        yield Table(
            [f"site ({self.runtime})", "#codes that differ", "#largest, LSB", "#SQNR", ""],
            [
                (
                    site.site,
                    percent(site.differing),
                    site.largest,
                    decibels(site.sqnr_db),
                    site.grid
                    or (("rounding differs" if self._only_rounding else "diverges") if site.diverges else None),
                )
                for site in self.sites
            ],
        )
        if self.unseen:
            yield f"sites without separate codes in the artefact: {', '.join(self.unseen)}"
        if self.probe is not None:
            identical = "equal those of the artefact"
            fused = "differ, because the runtime fuses operators differently there"
            verdict = identical if self.probe.outputs_identical else fused
            yield f"measured in a copy with {self.probe.outputs} more outputs; its other outputs {verdict}"
        yield f"first diverging site on {self.runtime}: {self.first_divergence or 'none'}"

    @property
    def first_divergence(self) -> str | None:
        """The first site, in the order of execution, whose codes differ by more than rounding."""
        damaged = next((damage.site for damage in self.damages), None)
        if self.rounding is None:
            return next((site.site for site in self.sites if site.diverges), damaged)
        changed = next((site.site for site in self.sites if site.damaged), damaged)
        return changed or self.rounding.wrong


def _agreement(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.4g} %"


@strict
def check(
    model: nn.Module,
    artefact: str | Path,
    batches: Iterable[Any],
    *,
    runtime: str | None = None,
    per_site: bool = False,
    threads: Count | None = None,
    measure: bool = True,
) -> Check:
    """Run `batches` through the prepared model and through the artefact on the real runtime, and compare.

    The default `runtime` is that of the plan's backend. The result states whether the runtime computes what the
    simulated model computes (`passed`), and how far that is from the float model (`distance`, with warnings). With
    `per_site`, the first batch is also compared at every site, in the order of execution. Without `measure`, the
    distance from the float model isn't measured.

    >>> import tempfile, torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x])
    >>> artefact = quantized.export(tempfile.mkdtemp() + "/model.onnx")
    >>> bitwright.check(quantized.model, artefact.path, [x])
    <Check on onnxruntime: passed, 16 samples>
    """
    artefact = Path(artefact)
    if runtime is None or RUNTIMES.get(runtime).suffix != FOLDER:
        artefact = artefact_file(artefact)
    noted: list[Problem] = []
    if runtime is None:
        runtime, other = default_runtime(attachment_of(model).plan.backend, artefact)
        noted += [] if other is None else [other]
    real = open_runtime(runtime, artefact, threads=threads)
    if real.suffix == ".onnx" and (kind := kind_of_artefact(artefact)) != QDQ:
        read_artefact(artefact)  # raises another error if the files changed since the export
        raise ArtefactError(
            "this artefact is a float model with a separate file of quantization parameters",
            where=str(artefact),
            value=kind,
            fix='export with artefact="qdq" (--artefact qdq) to check the same numbers here',
            code="float-artefact",
        )
    sums: dict[str, AgreementSums] = {}
    samples, seen, growth = 0, CalibrationData(), GrowthProbe(model, real, artefact)
    first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    with eval_mode(model):
        for batch in batches:
            args, kwargs = as_call(batch)
            first = first or (args, kwargs)
            samples += next((int(t.shape[0]) if t.dim() else 1 for _, t in tensors_in((args, kwargs))), 1)
            if any(tensor.numel() for _, tensor in tensors_in(seen.see(batch))):
                with report_batch_errors(model, batch):
                    _compare(model, real, args, kwargs, sums, growth)
                    _compare_steps(model, real, batch, sums)
        if first is None or not sums:
            what = "there is no batch to check with" if first is None else "all batches to check with are empty"
            raise WorkloadError(what, fix="give at least one batch that isn't empty", code="no-data")
        sites = check_sites(model, real, artefact, *first) if per_site else None
        looked, damages = _look(model, real, artefact, *first)
    outputs = tuple(sum_.result(name) for name, sum_ in sums.items())
    rounding = None if all(output.passed for output in outputs) else growth.result
    noted += [rounding.warning()] if rounding is not None and rounding.explains else []
    distance = distance_of(attachment_of(model), sums, looked, samples) if measure else None
    noted += [] if distance is None else distance.warnings
    noted += real.concerns(model, _token_ids(first))
    noted += seen.warnings("the data to check with", fix="check with samples of the data in use", suffix="check")
    if not type(real).has_digests(artefact):
        noted.append(_no_digests(artefact))
    log_warnings(noted)
    noted += warnings_of(model)  # already logged
    return Check(
        runtime=runtime,
        samples=samples,
        outputs=outputs,
        sites=() if sites is None else sites.checks,
        unseen=() if sites is None else sites.unseen,
        probe=None if sites is None else sites.probe,
        distance=distance,
        warnings=tuple(noted),
        damages=damages,
        rounding=rounding,
    )


def _token_ids(batch: Any) -> Tensor | None:
    """The tokens of a batch of a decoder."""
    ids = next((tensor for _, tensor in tensors_in(batch)), None)
    return ids if ids is not None and ids.dim() == 2 and not ids.is_floating_point() else None


def _no_digests(artefact: Path) -> Problem:
    return Problem(
        what="the artefact has no digests, so changed numbers outside of quantized weights may not be found",
        where=str(artefact),
        fix="export it again with this version",
        code="no-digests",
    )


def default_runtime(name: str | None, artefact: Path) -> tuple[str, Problem | None]:
    """The backend's runtime if it can read the file here. Otherwise another runtime that can, and the reason."""
    usable = readers(artefact)
    table = None if name is None else backend(name)
    if table is not None and table.runtime in usable:
        return table.runtime, None
    chosen = DEFAULT_RUNTIME if DEFAULT_RUNTIME in usable else usable[0]
    if table is None or table.runtime is None or RUNTIMES.get(chosen).decoders_only:  # only these read the file
        return chosen, None
    kind: type[Runtime] | None = RUNTIMES.get(table.runtime) if table.runtime in RUNTIMES else None
    if kind is not None and kind.suffix != artefact.suffix:
        reason, fix = f"reads {kind.suffix} files", f"export a {kind.suffix} file, and check that"
    else:
        problem = "it is not registered" if kind is None else kind.missing()
        reason, fix = f"can't be used here ({problem})", f"pip install 'bitwright[{table.runtime}]'"
    what = f"checked on {chosen} instead of {table.runtime}, the backend's runtime: {table.runtime} {reason}"
    return chosen, Problem(what=what, where=str(artefact), fix=fix, code="other-runtime")


def _look(
    model: nn.Module, real: Runtime, artefact: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[SiteDistance, ...], tuple[Damage, ...]]:
    """Measure the effect of quantizers, and compare the artefact's values with the exported ones and the model's."""
    kind = type(real)
    try:
        stored = StoredSites(kind.stored(artefact))
    except ArtefactError:  # not accessible in this runtime, or an artefact of another model, which the outputs reveal
        stored = StoredSites({})
    with torch.no_grad(), in_mode(model, "quantize"):
        looked = measure_sites(model, lambda: call_copied(model, args, kwargs), stored.look)
    by_site = {damage.site: damage for damage in kind.damages(artefact)}
    ordered = {**{site: by_site[site] for site in stored.seen_in_order if site in by_site}, **by_site}
    return looked.sites, tuple({**stored.found, **ordered}.values())


def _compare(
    model: nn.Module,
    real: Runtime,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sums: dict[str, AgreementSums],
    growth: GrowthProbe,
) -> None:
    """Compare the outputs for one batch. If one differs too much, compare again with the runtime's codes."""
    rounded: list[tuple[str, Tensor]] | None = None
    with torch.no_grad():
        with in_mode(model, "quantize"), real.simulating(model):
            simulated = list(tensors_in(call_copied(model, args, kwargs)))
        if (own := real.rounding(model)) is not None:
            with in_mode(model, "quantize"), own:
                rounded = list(tensors_in(call_copied(model, args, kwargs)))
        with in_mode(model, "float"):
            exact = [tensor for _, tensor in tensors_in(call_copied(model, args, kwargs))]
    decoder = len(real.outputs) == 1 and is_decoder(bare(model))
    if decoder:  # the scores; `_compare_steps` compares the cache
        simulated, exact = simulated[:1], exact[:1]
        rounded = None if rounded is None else rounded[:1]
    results = real.run(real.feed(*args, **kwargs))
    if len(results) != len(simulated):
        raise ArtefactError(
            f"the artefact has {len(results)} outputs, the model {len(simulated)}",
            fix="export the artefact from this model",
            code="output-count",
        )
    agrees = True
    for index, ((path, tensor), array, truth) in enumerate(zip(simulated, results, exact, strict=True)):
        if tuple(array.shape) != tuple(tensor.shape):
            raise ArtefactError(
                "the artefact's output has a different shape than the model's",
                where=path or "output",
                value=f"{tuple(array.shape)} against {tuple(tensor.shape)}",
                fix="export the artefact from this model",
                code="output-shape",
            )
        ours, exactly = as_array(tensor), as_array(truth)
        refuse_nan(path, simulated=ours, real=array, exact=exactly, runtime=real.name)
        noisy = None if rounded is None else as_array(rounded[index][1])
        if decoder and tensor.dim() == 3:  # a row for each token
            ours, array, exactly = (one.reshape(-1, one.shape[-1]) for one in (ours, array, exactly))
            noisy = None if noisy is None else noisy.reshape(ours.shape)
        sums.setdefault(path or "output", AgreementSums()).add(ours, array, exactly, noisy)
        agrees = agrees and agreement_of(path, ours, array, exactly, noisy).passed
    if not agrees:
        growth.examine(args, kwargs, real=results, exact=[as_array(truth) for truth in exact])


def _compare_steps(model: nn.Module, real: Runtime, batch: Any, sums: dict[str, AgreementSums]) -> None:
    """For a decoder: compare the scores of a prompt and of single tokens after it, each side with its own cache."""
    ids, session = _token_ids(batch), real.decoding()
    if session is None or ids is None or ids.shape[1] < 2:
        return
    tokens = as_array(ids[:1])
    prompt = max(1, tokens.shape[1] // 2)
    parts = [tokens[:, :prompt], *(tokens[:, at : at + 1] for at in range(prompt, tokens.shape[1])[:_STEPS])]
    with cached_forward(model) as sizes:
        simulated, exact = (SimulatedDecoder(model, sizes) for _ in range(2))
        with in_mode(model, "quantize"), real.simulating(model):
            decoder = DecoderSession(simulated)
            ours = [decoder.feed(part) for part in parts]
        noisy: list[NDArray[np.float32]] | None = None
        if (own := real.rounding(model)) is not None:
            with in_mode(model, "quantize"), own:
                decoder = DecoderSession(SimulatedDecoder(model, sizes))
                noisy = [decoder.feed(part) for part in parts]
        with in_mode(model, "float"):
            decoder = DecoderSession(exact)
            truth = [decoder.feed(part) for part in parts]
    for index, part in enumerate(parts):
        name = "decoding" if index else "prompt"
        shape = (-1, ours[index].shape[-1])
        refuse_nan(name, simulated=ours[index], real=(found := session(part)), exact=truth[index], runtime=real.name)
        compared = [ours[index], found, truth[index], *([] if noisy is None else [noisy[index]])]
        sums.setdefault(name, AgreementSums()).add(*(one.reshape(shape) for one in compared))
