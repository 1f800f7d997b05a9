"""What one run found, as data and as a page."""

from bitwright.report import words
from bitwright.report.assemble import make_record
from bitwright.report.comparison import Comparison
from bitwright.report.environment import environment
from bitwright.report.html import write_html
from bitwright.report.record import (
    RECORD_VERSION,
    Accuracy,
    Environment,
    FloatOperator,
    Parity,
    Record,
    SiteRow,
    Size,
    StepRow,
    Timing,
    read_json,
    write_json,
)
from bitwright.report.rows import parity, timing, timings
from bitwright.report.sites import site_rows

__all__ = [
    "RECORD_VERSION",
    "Accuracy",
    "Comparison",
    "Environment",
    "FloatOperator",
    "Parity",
    "Record",
    "SiteRow",
    "Size",
    "StepRow",
    "Timing",
    "environment",
    "make_record",
    "parity",
    "read_json",
    "site_rows",
    "timing",
    "timings",
    "words",
    "write_html",
    "write_json",
]
