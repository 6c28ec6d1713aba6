"""The cost of the transition from training to generation, compared with other methods and a memory copy.

    python benchmarks/resharding.py [--models 15M 500M] [--ranks 2 4] [--repeats 7]

Ranks are processes of this machine that talk through gloo. Each case runs by itself, all ways in turn, so that they
share whatever else the machine does; seconds are medians of the slowest rank. Ways:

    in place          ours; trained weights are views of the rollout's wherever one rank holds both
    copied            ours; trained weights have memory of their own
    shared memory     ours, in place, through memory that processes share
    verified          copied, with the checksums of both sides compared
    gather and slice  others: every weight gathered whole on every rank by collectives, the rank's part copied out of it
    send and slice    the same, point to point, which gloo does faster for large weights
    memory copy       a plain copy of as many bytes as a rank's rollout holds, on all ranks at once

Prints a table and writes it, with all numbers, to benchmarks/results/resharding-<date>.{txt,json}.
"""

import argparse
import logging
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from record import run_reporting, write_record

logger = logging.getLogger("resharding")

HERE = Path(__file__).parent
CASES = {
    2: ("fsdp 2 -> 1", "tp 2 -> 1", "fsdp 2 -> 2", "tp 2 -> 2"),
    4: ("fsdp 4 -> 2", "tp 4 -> 2", "2x2 -> 2", "fsdp 4 -> 1", "tp 4 -> 1", "tp 4 -> 4"),
}
WAYS = ("in place", "copied", "shared memory", "verified", "gather and slice", "send and slice", "memory copy")
MIB = 1 << 20

Report = dict


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes; returns 1 when a case could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["15M", "500M"], choices=["15M", "500M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is given up")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    reports: list[Report] = []
    for model in options.models:
        for ranks in options.ranks:
            for case in CASES[ranks]:
                logger.info("%s  %s  load=%.1f", model, case, os.getloadavg()[0])
                command = [sys.executable, "-W", "ignore", str(HERE / "resharding_ranks.py"), model, str(ranks), case]
                found = run_reporting([*command, "--repeats", str(options.repeats)], options.timeout)
                if found is None:
                    return 1
                reports.append({"model": model, "ranks": ranks, "case": case, "load": os.getloadavg()[0], **found})
    text = table(reports)
    sys.stdout.write(text)
    path = options.results / f"resharding-{datetime.now():%Y-%m-%d-%H%M}.json"
    write_record(path, [], {"cases": reports})
    path.with_suffix(".txt").write_text(text)
    logger.info("written %s", path)
    return 0


def table(reports: list[Report]) -> str:
    """Bytes, then milliseconds, then peak memory; one line a case."""
    loads = [report["load"] for report in reports]
    lines = [
        f"Transition of weights, {os.cpu_count()} cores ({platform.machine()}), load {min(loads):.1f}-{max(loads):.1f}",
        "",
        _line("MiB per rank", "model", "received", "bound", "in place", "copied", "by others"),
    ]
    for report in reports:
        reported = [report["ways"][way]["report"] for way in ("in place", "copied")]
        sizes = [
            report["model_bytes"],
            max(report["bytes_received"]),
            max(report["lower_bound"]),
            reported[0]["bytes_copied"],
            reported[1]["bytes_copied"],
            report["bytes_of_others"],
        ]
        lines.append(_line(_title(report), *(f"{size / MIB:.1f}" for size in sizes)))
    lines += ["", _line("milliseconds", *WAYS, "gather/ours", "send/ours", "copied/copy")]
    for report in reports:
        seconds = {way: report["ways"][way]["seconds"] for way in WAYS}
        ratios = [
            seconds["gather and slice"] / seconds["in place"],
            seconds["send and slice"] / seconds["in place"],
            seconds["copied"] / seconds["memory copy"],
        ]
        cells = [f"{1e3 * seconds[way]:.1f}" for way in WAYS]
        lines.append(_line(_title(report), *cells, *(f"{ratio:.2f}" for ratio in ratios)))
    lines += ["", _line("peak MiB without weights", *WAYS)]
    for report in reports:
        peaks = [report["ways"][way]["peak_bytes"] / MIB for way in WAYS]
        lines.append(_line(_title(report), *(f"{peak:.1f}" for peak in peaks)))
    return "\n".join([*lines, ""])


def _title(report: Report) -> str:
    return f"{report['model']:>5}  {report['case']}"


def _line(title: str, *cells: str) -> str:
    return f"{title:<24}" + "".join(f"{cell:>17}" for cell in cells)


if __name__ == "__main__":
    raise SystemExit(main())
