"""Small runs of the real commands, and what they leave behind."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridflow.observability.logs import logging_restored
from hybridflow.trainer import main_ppo

NOT_REPRODUCIBLE = ("timing_s/", "perf/")
"""Metrics that measure the machine."""

Row = dict[str, float]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status (negative: the signal that killed it) and all that it said."""

    status: int
    said: str

    @property
    def words(self) -> str:
        """What it said, with every run of white space one space: as it reads, however it was wrapped."""
        return " ".join(self.said.split())


def small_run(folder: Path) -> list[str]:
    """Settings of a run of seconds: 4 steps of the calculator on 64 sums, which are written below `folder`."""
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(12, 92, 9) for b in range(7, 95, 11)]
    for name, rows in (("sums", sums[8:]), ("held_out", sums[:8])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "trainer={total_steps: 4, save_every: 2, eval_every: 2, samples_every: 2, threads: 1, device: cpu}",
        "trainer={backend: local, trackers: [console, jsonl]}",
        "model.path=builtin:calculator",
        "reward.functions=[exact_match]",
        f"data={{train_files: [{folder}/sums.jsonl], eval_files: [{folder}/held_out.jsonl]}}",
        "data={batch_size: 8, max_prompt_tokens: 8, max_response_tokens: 4}",
        "rollout.samples_per_prompt=2",
        "actor={minibatch_size: 4, epochs: 1}",
        "critic={minibatch_size: 4, epochs: 1}",
        "actor.optimizer={learning_rate: 1e-4, warmup_steps: 0, schedule: constant}",
        "critic.optimizer={learning_rate: 1e-3, warmup_steps: 0, schedule: constant}",
    ]


def run_here(settings: Sequence[str], *, command: Callable[[Sequence[str]], int] = main_ppo.main) -> Ended:
    """A command in this process."""
    said = io.StringIO()
    with _as_it_was(), redirect_stderr(said):
        status = command(list(settings))
    return Ended(status, said.getvalue())


def run_well(settings: Sequence[str], *, command: Callable[[Sequence[str]], int] = main_ppo.main) -> Ended:
    """A command in this process, which must end well."""
    ended = run_here(settings, command=command)
    assert ended.status == 0, ended.said
    return ended


def assert_refused(ended: Ended, found: str, remedy: str) -> None:
    """Status 2, with the words of the error and of its remedy."""
    assert ended.status == 2, ended.said
    message, _, advice = ended.words.partition("What to do:")
    assert found in message and remedy in advice, ended.said
    assert "Traceback" not in ended.said


def rows_of_run(
    run_dir: Path, settings: Sequence[str], *, command: Callable[[Sequence[str]], int] = main_ppo.main
) -> list[Row]:
    """The metrics of a run in `run_dir`, which must end well."""
    run_well([*settings, f"trainer.run_dir={run_dir}"], command=command)
    return metric_rows(run_dir)


def metric_rows(run_dir: Path) -> list[Row]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def sample_rows(run_dir: Path) -> list[dict]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def reproducible(rows: Sequence[Row]) -> list[Row]:
    """The metrics that the same seed must give again, to the last bit."""
    return [{name: value for name, value in row.items() if not name.startswith(NOT_REPRODUCIBLE)} for row in rows]


def steps_of(run_dir: Path) -> list[int]:
    """The steps in metrics.jsonl, as they stand there."""
    return [int(row["step"]) for row in metric_rows(run_dir)]


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Puts back what a run sets for its whole process: log handlers, levels, threads."""
    threads = torch.get_num_threads()
    try:
        with logging_restored():
            yield
    finally:
        torch.set_num_threads(threads)
