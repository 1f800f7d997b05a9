"""Records with made-up numbers, for tests of what is made from them."""

from __future__ import annotations

from bitwright.bench.comparison import Fastest, OnRuntime, Skipped
from bitwright.deployment import Latency
from bitwright.reports import (
    Accuracy,
    Comparison,
    Executed,
    ExecutedSites,
    FloatDistance,
    FloatOperator,
    Forecast,
    GridRow,
    Histogram,
    LatencyRow,
    Node,
    OnDevice,
    Parity,
    Record,
    RunRow,
    Sensitivity,
    SiteRow,
    Size,
    StepRow,
    TrainingRecord,
    TrialRow,
    TuningRecord,
    WarningRow,
    environment,
    timings,
)
from bitwright.reports.sections import (
    FloatTrialRow,
    ForecastDevice,
    MeasuredSteps,
    PredictedAndMeasured,
    SiteSensitivity,
    Span,
    SuggestionRow,
)

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'


def record(name: str = "net") -> Record:
    """A record that has every part; `name` is put wherever a name goes. The numbers are made up."""
    site = SiteRow(
        site=f"{name}:weight",
        format="int8/channel/sym",
        observer=name,
        quantizer="plain",
        guard=name,
        share=None,
        scales=8,
        scale_min=0.01,
        scale_max=0.02,
        zero_point_min=0,
        zero_point_max=0,
        low=-2.56,
        high=2.54,
        clipped=0.125,
        sqnr_db=40.5,
        why=name,
        seen_low=-3.0,
        seen_high=2.5,
        histogram=Histogram(low=-3.2, high=3.2, counts=(3, *range(1, 63), 9)),
    )
    second = site.model_copy(update={"site": f"{name}:input", "format": "uint4/tensor/asym", "sqnr_db": 21.5})
    fast, slow = (Latency(median_ms=m, p10_ms=m * 0.9, p90_ms=m * 1.2, p99_ms=m * 1.3, runs=9) for m in (1.0, 2.0))
    return Record(
        distance=FloatDistance(samples=16, sqnr_db=8.5, top1_agreement=0.5, far=True, worst={f"{name}:weight": 9.5}),
        warnings=(WarningRow(code="far-from-float", what=name, where=name, fix=name),),
        title=name,
        workload=name,
        backend=name,
        created="2026-01-02T03:04:05+00:00",
        seed=0,
        plan_sha256="0" * 64,
        environment=environment(),
        accuracies=(
            Accuracy(where="float", metric="top1", value=91.5, samples=100),
            Accuracy(where=name, metric="top1", value=91.25, samples=100),
        ),
        sizes=(Size(name="float", bytes=1000), Size(name=name, bytes=260)),
        timings=tuple(timings(name, 1, 1, float=slow, quantized=fast)),
        parities=(
            Parity(
                runtime=name,
                passed=False,
                samples=3,
                sqnr_db=None,
                max_error=0.5,
                top1_agreement=0.75,
                first_divergence=name,
            ),
        ),
        sites=(site, second),
        float_operators=(FloatOperator(operator=name, kind="softmax", why=name),),
        folds={name: name},
        steps=(StepRow(step=name, units=7, seconds=12.34, skipped={name: name}),),
        graph=tuple(
            Node(name=one, kind=name, inputs=inputs, shape=(1, 8), macs=64, level=level, lane=0)
            for level, (one, inputs) in enumerate(((name, ()), ("second", (name,)), ("third", ("second", name))))
        ),
        sensitivity=Sensitivity(
            samples=64,
            sites=(_sensitive(f"{name}:weight", 0.02), _sensitive(f"{name}:input", 0.01)),
            together=_sensitive("all", 0.03),
            suggestion=SuggestionRow(
                metric="top1", before=91.25, trials=(FloatTrialRow(operators=(name,), metric=91.5),), operators=(name,)
            ),
        ),
        forecasts=(_forecast(name),),
        tuning=TuningRecord(
            metric="top1",
            strategy=name,
            goal=name,
            limit=90.5,
            met_goal=True,
            stopped_because=name,
            float_metrics={"top1": 91.5},
            float_size=1000,
            full_evaluations=2,
            notes=(name,),
            trials=tuple(_trial(number, name) for number in (1, 2, 3)),
        ),
        training=TrainingRecord(
            metric="top1",
            precision=name,
            metrics=({"top1": 80.0, name: 1.0}, {"top1": 91.5, name: 2.0}),
            best_epoch=2,
            steps=20,
            processes=1,
            config_hash=name,
            settings={name: name},
            init=name,
            notes=(name,),
        ),
        comparison=_comparison(name, tuple(timings(name, 1, 1, float=slow, quantized=fast))),
        row=_row(name),
        others=(
            RunRow(
                title=name,
                created="2026-01-02T03:04:05+00:00",
                accuracy=Accuracy(where=name, metric="top1", value=90.0),
                size=Size(name=name, bytes=200),
            ),
        ),
    )


def _row(name: str) -> GridRow:
    ran = ExecutedSites(quantizer=name, format=f"int8/{name}", sites=1, levels=256)
    return GridRow(
        id=name,
        config={"bits": [8], "models": [{"workload": name}]},
        executed=Executed(weights=(ran,), activations=(ran,), biases=1, folding={name: 1}, kept_float={name: name}),
        device=OnDevice(runtime=name, accuracy=89.5, gap=-0.5, kinds={name: 1}),
        beyond=name,
        notes=(name,),
        start=name,
    )


def _sensitive(site: str, error: float) -> SiteSensitivity:
    return SiteSensitivity(
        site=site, format="int8", sqnr_db=40.0, output_error=error, cosine_distance=error**2, loss_change=error / 2
    )


def _trial(number: int, name: str) -> TrialRow:
    return TrialRow(
        number=number,
        candidate=name,
        passed=number > 1,
        metrics={"top1": 89.0 + number},
        stopped=number == 1,
        failed=None,
        latency_ratio=0.3 * number,
        size=100 * number,
        pareto=number == 3,
        best=number == 3,
        seconds=1.5,
    )


def _forecast(name: str) -> Forecast:
    phases = {"forward": 2.0, "loss": 0.1, "backward": 3.9, "optimizer": 1.0}
    device = ForecastDevice(
        name=name,
        count=2,
        computing_ms=7.0,
        busy=0.9,
        communicating=0.2,
        waiting=0.1,
        phases_ms=phases,
        memory_peak=3_000_000,
        memory_cause=name,
        memory_limit=2_000_000,
        spans=(
            Span(name=name, kind="forward", start_ms=0.0, end_ms=2.0),
            Span(name=name, kind="collective", start_ms=4.0, end_ms=6.0),
        ),
    )
    return Forecast(
        name=name,
        step_ms=7.0,
        samples_per_second=1000.0,
        critical=(name, name),
        devices=(device,),
        measured=MeasuredSteps(
            steps=5,
            step=PredictedAndMeasured(name="step", predicted_ms=7.0, measured_ms=7.5),
            phases=tuple(
                PredictedAndMeasured(name=phase, predicted_ms=ms, measured_ms=1.1 * ms) for phase, ms in phases.items()
            ),
            groups=(PredictedAndMeasured(name=name, predicted_ms=1.0, measured_ms=0.0),),
            drift=1.05,
        ),
    )


def _comparison(name: str, rows: tuple[LatencyRow, ...]) -> Comparison:
    return Comparison(
        workload=name,
        created="2026-01-02T03:04:05+00:00",
        environment=environment(),
        runtimes=(
            OnRuntime(
                runtime=name,
                backend=name,
                executed={name: 7},
                sizes=(Size(name="float", bytes=1000), Size(name="quantized", bytes=260)),
                parity=Parity(
                    runtime=name,
                    passed=True,
                    samples=3,
                    sqnr_db=50.0,
                    max_error=0.1,
                    top1_agreement=1.0,
                    first_divergence=None,
                ),
                accuracies=(
                    Accuracy(where="float", metric="top1", value=91.5),
                    Accuracy(where="quantized", metric="top1", value=91.0),
                ),
                timings=rows,
            ),
        ),
        skipped=(Skipped(runtime=name, why=name),),
        fastest=(Fastest(batch=1, runtime=name, variant="quantized", median_ms=1.0),),
    )


def large(sites: int) -> Record:
    """Many sites of a chain with shortcuts, two to an operator."""
    small = record()
    nodes = tuple(
        Node(
            name=f"layers.{n}.conv",
            kind="conv2d",
            inputs=(f"layers.{n - 1}.conv",) if n else (),
            shape=(1, 8),
            macs=100 + n,
            level=n,
            lane=0,
        )
        for n in range(sites // 2)
    )
    rows = tuple(
        small.sites[0].model_copy(
            update={"site": f"layers.{n // 2}.conv:{'weight' if n % 2 else 'input'}", "sqnr_db": 20.0 + (7 * n) % 31}
        )
        for n in range(sites)
    )
    return small.model_copy(update={"graph": nodes, "sites": rows})
