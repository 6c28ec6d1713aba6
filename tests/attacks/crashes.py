"""Runs that are killed or asked to end at random moments, and the same command again, until it comes to its end.

    python -m tests.attacks.crashes --kills 40 --terms 20 --seed 0

Each chain must end with the metrics (but for times and memory), samples and weights of a run that was never
interrupted, bit for bit, and leave neither processes nor partial checkpoints behind.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SETTINGS = (
    "trainer.total_steps=14", "trainer.save_every=2", "trainer.eval_every=7", "trainer.samples_every=1",
    "trainer.sample_rows=64", "trainer.threads=1", "trainer.trackers=[console,jsonl]", "data.batch_size=16",
    "data.eval_limit=16",
)  # fmt: skip
"""A small run of the built-in task: seconds, with a checkpoint every other step."""

_MEASURED = ("timing", "perf/", "memory", "throughput")
"""Parts of the names of metrics that differ from run to run."""


@dataclass
class Chain:
    """One directory, in which the command was started again after each signal until it ended by itself."""

    interruptions: int = 0
    statuses: list[int] = field(default_factory=list)
    """Exit statuses of the starts that were interrupted."""

    problems: list[str] = field(default_factory=list)


def cases(seed: int, *, longest_seconds: float) -> Iterator[list[float]]:
    """Chains of three to six interruptions without end: seconds after the start at which each one comes."""
    source = random.Random(seed)
    while True:
        yield [source.uniform(0.5, longest_seconds) for _ in range(source.randint(3, 6))]


def command(run_dir: Path) -> list[str]:
    """The run that is attacked."""
    return [sys.executable, "-m", "hybridflow.trainer.main_ppo", f"trainer.run_dir={run_dir}", *SETTINGS]


def run_chain(run_dir: Path, moments: Sequence[float], wanted: signal.Signals) -> Chain:
    """Starts the command until it ends by itself; while moments are left, each start is interrupted at the next one."""
    chain, left = Chain(), list(moments)
    while True:
        process = subprocess.Popen(command(run_dir), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        limit, is_last = (left.pop(0), False) if left else (300.0, True)
        said = _said(process, limit)
        if said is None and not is_last:
            process.send_signal(wanted)
            chain.interruptions += 1
            if _said(process, 60.0) is not None:
                chain.statuses.append(process.returncode)
                continue
            chain.problems.append(f"the run went on for 60 s after {wanted.name}")
        elif said is None:
            chain.problems.append("the run did not end within 300 s")
        elif process.returncode:
            chain.problems.append(f"exit status {process.returncode}: {said[-600:]}")
        process.kill()
        process.wait()
        return chain


def _said(process: subprocess.Popen[str], limit_seconds: float) -> str | None:
    """The output of a process that ends within the limit."""
    try:
        return process.communicate(timeout=limit_seconds)[0]
    except subprocess.TimeoutExpired:
        return None


def outcome(run_dir: Path) -> dict[str, str]:
    """What must not depend on interruptions: digests of metrics, samples and the last checkpoint's weights."""
    found = {}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not any(part in k for part in _MEASURED)} for row in rows]
    found["metrics"] = json.dumps(kept, sort_keys=True)
    found["samples"] = (run_dir / "samples.jsonl").read_text()
    for path in sorted((run_dir / "checkpoints" / "step_14").rglob("*.safetensors")):
        found[str(path.relative_to(run_dir))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def left_behind(run_dir: Path) -> list[str]:
    """Partial checkpoints, and processes that still name the run's directory."""
    found = [str(path) for path in run_dir.rglob("*partial*")]
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_text()
            except OSError:
                continue
            if str(run_dir) in words:
                found.append(f"process {process.name}")
    return found


def attack(kind: signal.Signals, count: int, *, seed: int, scratch: Path) -> list[Chain]:
    """Chains until `count` interruptions have come while a run was under way, compared with a run that was left alone.

    A run that ends before its moment ends its chain, and the moment does not count.
    """
    plain = scratch / "plain"
    started = time.perf_counter()
    if not plain.exists():
        subprocess.run(command(plain), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    longest = time.perf_counter() - started
    expected, chains, left = outcome(plain), [], count
    for number, moments in enumerate(cases(seed, longest_seconds=longest)):
        if left == 0:
            break
        run_dir = scratch / f"{kind.name.lower()}_{number}"
        chain = run_chain(run_dir, moments[:left], kind)
        left -= chain.interruptions
        time.sleep(0.5)
        if not chain.problems:
            found = outcome(run_dir)
            chain.problems += [f"differs: {name}" for name in expected if found.get(name) != expected[name]]
        chain.problems += left_behind(run_dir)
        if kind is signal.SIGTERM:
            chain.problems += [f"status {status}" for status in chain.statuses if status not in (143, -15)]
        chains.append(chain)
        shutil.rmtree(run_dir)
    return chains


def main(argv: Sequence[str] | None = None) -> int:
    """Attacks as the command line says, and prints a line for each kind of signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in ((signal.SIGKILL, options.kills), (signal.SIGTERM, options.terms)):
            chains = attack(kind, count, seed=options.seed, scratch=Path(folder)) if count else []
            bad = [problem for chain in chains for problem in chain.problems]
            failed += len(bad)
            interruptions = sum(chain.interruptions for chain in chains)
            sys.stdout.write(f"{kind.name}: {interruptions} in {len(chains)} chains, {len(bad)} problems\n")
            sys.stdout.writelines(f"  {problem}\n" for problem in bad)
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
