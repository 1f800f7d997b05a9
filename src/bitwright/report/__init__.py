"""What one run found, as data and as a page."""

from bitwright.report import words
from bitwright.report.assemble import make_record
from bitwright.report.comparison import Comparison
from bitwright.report.environment import environment
from bitwright.report.folder import add_to_report, join, new_record, report_of, write_report
from bitwright.report.forecast import Forecast, forecast
from bitwright.report.html import write_html
from bitwright.report.markdown import write_markdown
from bitwright.report.network import Node, network
from bitwright.report.ran import Executed, GridRow, OnDevice, Sites
from bitwright.report.record import (
    RECORD_VERSION,
    Accuracy,
    Environment,
    FloatDistance,
    FloatOperator,
    Histogram,
    Parity,
    Record,
    RunRow,
    SiteRow,
    Size,
    StepRow,
    Timing,
    Warned,
    read_json,
    write_json,
)
from bitwright.report.rows import float_distance, parity, timing, timings, warned
from bitwright.report.searched import Training, Trial, Tuning
from bitwright.report.sensitivity import Sensitivity, sensitivity
from bitwright.report.sites import site_rows

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
    "write_report",
]
