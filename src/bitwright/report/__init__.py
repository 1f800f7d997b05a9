"""What one run found, as data and as a page."""

from bitwright.report import words
from bitwright.report.build import float_distance, make_record, parity, site_rows, timing, timings, warned
from bitwright.report.comparison import Comparison
from bitwright.report.environment import environment
from bitwright.report.folder import add_to_report, join, new_record, report_of, write_html, write_report
from bitwright.report.forecast import Forecast, forecast
from bitwright.report.markdown import write_markdown
from bitwright.report.network import Node, network
from bitwright.report.record import RECORD_VERSION, Record, RunRow, read_json, write_json
from bitwright.report.record_parts import (
    Accuracy,
    Environment,
    Executed,
    FloatDistance,
    FloatOperator,
    GridRow,
    Histogram,
    OnDevice,
    Parity,
    Sensitivity,
    SiteRow,
    Sites,
    Size,
    StepRow,
    Timing,
    Training,
    Trial,
    Tuning,
    Warned,
    sensitivity,
)
from bitwright.report.summary_page import write_page

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
    "words",
    "write_html",
    "write_json",
    "write_markdown",
    "write_page",
    "write_report",
]
