"""What one run found, as data and as a page."""

from bitwright.bench.comparison import Accuracy, Comparison, Parity, Size, Timing, parity, timing, timings
from bitwright.bench.leaderboard import Executed, OnDevice, Sites
from bitwright.core.environment import Environment, environment
from bitwright.quantizers.site_statistics import Histogram, SiteRow, site_rows
from bitwright.report.build import float_distance, make_record, warned
from bitwright.report.folder import add_to_report, join, new_record, report_of, write_html, write_report
from bitwright.report.forecast import Forecast, forecast
from bitwright.report.markdown import write_markdown
from bitwright.report.network import Node, network
from bitwright.report.record import (
    RECORD_VERSION,
    FloatDistance,
    FloatOperator,
    GridRow,
    Record,
    RunRow,
    StepRow,
    Warned,
    read_json,
    write_json,
)
from bitwright.report.sensitivity import Sensitivity, sensitivity
from bitwright.report.summary_page import write_page
from bitwright.report.training import Training
from bitwright.report.tuning import Trial, Tuning

__all__ = [
    "RECORD_VERSION",
    "Accuracy",
    "Comparison",
    "Environment",
    "Executed",
    "FloatDistance",
    "FloatOperator",
    "Forecast",
    "GridRow",
    "Histogram",
    "Node",
    "OnDevice",
    "Parity",
    "Record",
    "RunRow",
    "Sensitivity",
    "SiteRow",
    "Sites",
    "Size",
    "StepRow",
    "Timing",
    "Training",
    "Trial",
    "Tuning",
    "Warned",
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
    "warned",
    "write_html",
    "write_json",
    "write_markdown",
    "write_page",
    "write_report",
]
