"""The process of one check: writes a line of JSON to a file for each finding and each thing that it begins."""

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hybridflow.doctor.check import Place
from hybridflow.doctor.checks.all import CHECKS
from hybridflow.doctor.finding import Finding, Status, plain, problem, said
from hybridflow.errors import HybridflowError

DOING, FINDING = "doing", "finding"
_LAST_LINES = 6


def main(arguments: Sequence[str]) -> None:
    """Runs the check of a name; the other arguments are the file for lines, a scratch directory and the run directory.

    An exception becomes a finding: its message and, unless it is one of hybridflow's errors, the end of its traceback.
    """
    name, lines, scratch, run_dir = arguments
    check = next(each for each in CHECKS if each.name == name)
    with Path(lines).open("a", encoding="utf-8", buffering=1) as file:
        doing = check.doing

        def begin(what: str) -> None:
            nonlocal doing
            doing = what
            _write(file, {DOING: what})

        try:
            for finding in check.run(Place(Path(scratch), Path(run_dir), begin)):
                _write(file, {FINDING: plain(finding)})
        except HybridflowError as error:
            _write(file, {FINDING: plain(problem(name, error.message, error.remedy))})
        except (Exception, SystemExit) as error:  # noqa: BLE001 (packages fail to import in every way)
            _write(file, {FINDING: plain(_failed(name, doing, error))})


def finding_of(fields: Mapping[str, object]) -> Finding:
    """The finding of a line."""
    text = {key: str(fields[key]) for key in ("name", "found", "remedy")}
    details = fields["details"]
    lines = tuple(map(str, details)) if isinstance(details, list) else ()
    return Finding(Status(fields["status"]), details=lines, **text)


def _failed(name: str, doing: str, error: BaseException) -> Finding:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return problem(
        name,
        f"{doing}: {type(error).__name__}: {said(error)}",
        f"The lines below '{name}' show where it failed. If they end in a package, reinstall that package.",
        lines[-_LAST_LINES:],
    )


def _write(file: TextIO, line: Mapping[str, object]) -> None:
    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
