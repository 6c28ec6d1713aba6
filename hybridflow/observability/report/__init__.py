"""The reports of runs: self-contained pages, rebuilt at any time from the run directories alone.

Read `record.py` (the data), then `page.py` (one run) and `comparison.py` (several); `charts.py` draws,
`server.py` serves.
"""

from hybridflow.observability.report.page import write_report

__all__ = ["write_report"]
