"""The report of a run: one self-contained report.html, rebuilt at any time from the run directory alone.

Read `record.py` (the data), then `page.py` (the page); `charts.py` draws.
"""

from hybridflow.observability.report.page import write_report

__all__ = ["write_report"]
