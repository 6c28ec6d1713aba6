"""Published numbers of other systems next to the predictions of `hybridflow.mapping`.

    python benchmarks/planning_rows.py

Takes seconds, and imports neither torch nor Ray.
"""

import sys

from benchmarks import planning_cells, planning_memory, planning_others, planning_times
from benchmarks.planning_report import shown


def main() -> int:
    """Prints every section, with the criteria that it meets and misses."""
    tables = (planning_memory, planning_times, planning_cells, planning_others)
    sys.stdout.write(shown(section for table in tables for section in table.sections()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
