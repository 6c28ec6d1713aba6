"""The cost of the controller: empty calls to Ray workers, and a batch moving driver -> group -> group.

    python benchmarks/controller.py [--rounds 2] [--mb 64]

Ours and raw Ray on the same actors run in one process, call by call in turn; verl's RayWorkerGroup in one of its own
(`make peers` builds its environment). A round runs both, so that they share whatever else the machine does. Prints a
table and writes all numbers to benchmarks/results/controller-<date>.json.
"""

import argparse
import logging
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from record import run_reporting, write_record

logger = logging.getLogger("controller")

HERE = Path(__file__).parent
PEER = HERE.parent / ".peers" / "verl" / "bin" / "python"
OURS, VERL = "hybridflow", "verl"
MOVES = (
    ("driver -> group", "driver_to_group", "raw_driver_to_group", ("driver_to_group",)),
    ("driver -> group -> driver", "echo_and_fetch", "raw_echo_and_fetch", ("echo",)),
    ("group -> group", "group_to_group", None, ("group_to_group_via_driver", "group_to_group_via_futures")),
    ("  and every byte read", "group_to_group_read", None, ("group_to_group_via_driver", "group_to_group_via_futures")),
    ("  3/4 of the prompts, shuffled", "group_to_group_picked", None, ()),
    (
        "driver -> group -> group",
        "driver_to_group_to_group",
        "raw_driver_to_group_to_group",
        ("driver_to_group_to_group_via_driver", "driver_to_group_to_group_via_futures"),
    ),
    (
        "  and every byte read",
        "driver_to_group_to_group_read",
        None,
        ("driver_to_group_to_group_via_driver", "driver_to_group_to_group_via_futures"),
    ),
)
"""Title, our route, raw Ray's, and verl's: its default, and with futures."""

Report = dict


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes; returns 1 when ours could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mb", type=int, default=64, help="MiB of the batch that moves")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a process is given up")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    commands = {
        OURS: [sys.executable, str(HERE / "controller_round.py"), "--mb", str(options.mb)],
        VERL: [str(PEER), "-W", "ignore", str(HERE / "peers" / "verl_worker_group.py"), "--mb", str(options.mb)],
    }
    if not PEER.exists():
        logger.warning("verl is left out: there is no %s. Build it with: make peers", PEER.relative_to(HERE.parent))
        del commands[VERL]
    reports: dict[str, list[Report]] = {system: [] for system in commands}
    for number in range(1, options.rounds + 1):
        for system, command in commands.items():
            logger.info("round %d  %s  load=%.1f", number, system, os.getloadavg()[0])
            report = run_reporting(command, options.timeout)
            reports[system].extend([report] if report else [])
    if not reports[OURS]:
        return 1
    sys.stdout.write(table(reports, options.mb))
    path = options.results / f"controller-{datetime.now():%Y-%m-%d-%H%M}.json"
    write_record(path, ["ray"], {"rounds": reports})
    logger.info("written %s", path)
    return 0


def table(reports: dict[str, list[Report]], mb: int) -> str:
    """Medians over the rounds: ours as a multiple of raw Ray, and verl (its default, and with futures) of ours."""
    lines = [
        f"Controller, {os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f}, medians",
        "",
        _line("milliseconds", "ours", "raw Ray", "verl", "futures", "ours/raw", "verl/ours", "futures/ours"),
    ]
    for workers in ("4", "8"):
        ours, raw = (_median(reports, OURS, name, workers) for name in ("noop_ms", "noop_raw_ray_ms"))
        lines.append(_row(f"empty call, {workers} workers", ours, raw, [_median(reports, VERL, "noop_ms", workers)]))
        pipelined = [_median(reports, system, "noop_pipelined_ms", workers) for system in (OURS, VERL)]
        lines.append(_row("  sent without waiting", pipelined[0], None, [pipelined[1]]))
    moves = f"move_{mb}mb_s"
    lines.append("")
    for title, ours, raw, peers in MOVES:
        found = [_median(reports, VERL, moves, peer, scale=1e3) for peer in peers]
        ours_ms = _median(reports, OURS, moves, ours, scale=1e3)
        raw_ms = _median(reports, OURS, moves, raw, scale=1e3) if raw else None
        lines.append(_row(f"{mb} MB {title}" if title[0] != " " else title, ours_ms, raw_ms, found))
    counted = reports[OURS][-1]["driver_bytes"]
    sizes = ", ".join(f"{size:,} for a batch of {name}" for name, size in counted.items())
    return "\n".join([*lines, "", f"Bytes through the driver, group -> group: {sizes}.", ""])


def _median(reports: dict[str, list[Report]], system: str, *keys: str, scale: float = 1.0) -> float | None:
    values = []
    for report in reports.get(system, []):
        value = report
        for key in keys:
            value = value.get(key, {})
        values.extend([scale * value] if isinstance(value, float) else [])
    return statistics.median(values) if values else None


def _row(title: str, ours: float | None, raw: float | None, peers: list[float | None]) -> str:
    assert ours is not None, f"ours was not measured: {title}"
    verl, futures = [*peers, None, None][:2]
    ratios = [raw and ours / raw, verl and verl / ours, futures and futures / ours]
    numbers = [f"{value:.2f}" if value else "" for value in (ours, raw, verl, futures)]
    return _line(title, *numbers, *(f"{ratio:.2f}" if ratio else "" for ratio in ratios))


def _line(title: str, *cells: str) -> str:
    return f"{title:<34}" + "".join(f"{cell:>13}" for cell in cells)


if __name__ == "__main__":
    raise SystemExit(main())
