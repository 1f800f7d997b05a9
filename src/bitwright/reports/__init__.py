"""Results of a run as JSON, HTML and Markdown."""

from bitwright.bench.comparison import Accuracy, Comparison, LatencyRow, Parity, Size, parity, timing, timings
from bitwright.bench.leaderboard import Executed, ExecutedSites, OnDevice
from bitwright.core.environment import Environment, environment
from bitwright.quantizers.site_statistics import Histogram, SiteRow, site_rows
from bitwright.reports.files import add_to_report, join, new_record, report_of, write_html, write_page, write_report
from bitwright.reports.markdown import write_markdown
from bitwright.reports.network import Node, network
from bitwright.reports.record import (
    RECORD_VERSION,
    FloatDistance,
    FloatOperator,
    GridRow,
    Record,
    RunRow,
    StepRow,
    WarningRow,
    float_distance,
    make_record,
    read_json,
    warning_rows,
    write_json,
)
from bitwright.reports.sections import (
    Forecast,
    Sensitivity,
    TrainingRecord,
    TrialRow,
    TuningRecord,
    forecast,
    sensitivity,
)

__all__ = [
    "RECORD_VERSION",
    "Accuracy",
    "Comparison",
    "Environment",
    "Executed",
    "ExecutedSites",
    "FloatDistance",
    "FloatOperator",
    "Forecast",
    "GridRow",
    "Histogram",
    "LatencyRow",
    "Node",
    "OnDevice",
    "Parity",
    "Record",
    "RunRow",
    "Sensitivity",
    "SiteRow",
    "Size",
    "StepRow",
    "TrainingRecord",
    "TrialRow",
    "TuningRecord",
    "WarningRow",
    "add_to_report",
    "environment",
    "float_distance",
    "forecast",
    "join",
    "make_record",
    "network",
    "new_record",
    "parity",
    "read_json",
    "report_of",
    "sensitivity",
    "site_rows",
    "timing",
    "timings",
    "warning_rows",
    "write_html",
    "write_json",
    "write_markdown",
    "write_page",
    "write_report",
]
