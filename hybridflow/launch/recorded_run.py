"""A run as its directory records it: its plan with the layouts that it had, and what its steps measured."""

import errno
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from hybridflow.config.derived import num_devices
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.placement import Device
from hybridflow.config.stored_inputs import found_in
from hybridflow.errors import ConfigError, DataError, Problems
from hybridflow.launch.automatic import as_recorded, devices_of
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.files import file_content
from hybridflow.launch.compose.run_files import COMMAND, with_files
from hybridflow.launch.compose.trainers import known_command
from hybridflow.launch.plan.layouts import run_layouts
from hybridflow.launch.plan.plan import RunPlan, plan_run
from hybridflow.launch.plan_request import request_of
from hybridflow.launch.planning import KnownModels, request_on
from hybridflow.launch.run_directory import CONFIG_FILE
from hybridflow.launch.step_trace import trace_step
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.comparison import Comparison, compare
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.given_step import given_step
from hybridflow.mapping.measured import MeasuredStep
from hybridflow.mapping.planner import Answer, PlannedStep, answer
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.observability.jsonlines import rows_by_step
from hybridflow.observability.logs import LOG_FILE
from hybridflow.observability.trace import TRACE_FILE, read_trace
from hybridflow.observability.trackers.jsonl import METRICS_FILE

_MEAN_LENGTHS = ("prompt_length/mean", "response_length/mean")
_TOKENS = "perf/total_num_tokens"
_GPUS = re.compile(r"\bgpus=(?P<name>[^,]+?)(?:,.*)? directory=")
"""The GPUs in the line of run.log about the host."""


@dataclass(frozen=True)
class RecordedRun:
    """A run in its directory.

    run = RecordedRun(Path("runs/calculator"))
    step = run.planned_on(run.devices())
    predicted = dict(zip([each.name for each in step.request.operations], step.operation_seconds()))
    measured = run.measured().seconds_of(step.request.operations)
    """

    run_dir: Path

    @cached_property
    def plan(self) -> RunPlan:
        """The plan of the run, with the placement and the layouts that it ran with.

        Raises `DataError` if the directory does not hold a run.
        """
        composed = _composed(self.run_dir)
        device = composed.config.trainer.device
        plan = plan_run(composed, device="cpu" if device is Device.cpu else "cuda")
        return replace(plan, models=KnownModels(plan.config, plan.roles))

    def devices(self, word: str | None = None) -> Cluster:
        """The devices of the run; `word` describes them as in `--on`, alone (`H100`) or with the run's number.

        Raises `ConfigError` for another number, and if GPUs are not described, were not logged, and are not here.
        """
        trainer, wanted = self.plan.config.trainer, num_devices(self.plan.config)
        name = self._gpu_name() if self.plan.device == "cuda" else None
        if word is None and name is None:
            return devices_of(self.plan)
        found = cluster_of(word or name or "")
        if found.num_devices not in (1, wanted):
            raise ConfigError(
                f"--on {word} has {found.num_devices} devices, and the run in '{self.run_dir}' used {wanted}.",
                remedy=f"Name the kind of device alone, as in --on {found.device.name}.",
            )
        if found.num_devices == 1:
            found = replace(found, num_devices=wanted, devices_per_node=trainer.devices)
        return found

    def planned_on(self, cluster: Cluster, workload: Workload | None = None) -> PlannedStep:
        """The step of the run as the cost models predict it, for the rows of the run unless others are given."""
        request = request_of(self.plan, trace_step(self.plan), cluster)
        request = replace(request, workload=workload or self.workload(request.workload))
        return given_step(request, run_layouts(self.plan, device_bytes=cluster.device.memory_bytes))

    def measured(self) -> MeasuredStep:
        """Times of the steps in the trace of the run. Raises `DataError` without a step in it."""
        found = MeasuredStep.of(read_trace(self.run_dir))
        if found is not None:
            return found
        if not self.plan.config.trainer.trace_steps:
            raise DataError(
                f"The run in '{self.run_dir}' recorded no calls: trainer.trace_steps=0.",
                remedy="Run it again with trainer.trace_steps=20, the default; a few steps are enough.",
            )
        raise DataError(
            f"The run in '{self.run_dir}' has no finished training step in {TRACE_FILE}.",
            remedy="Give the directory of a run that trained for at least one step.",
        )

    def workload(self, planned: Workload) -> Workload:
        """The rows of a step with the mean and longest lengths that the run logged."""
        data, rows = self.plan.config.data, self._rows
        prompt, response = (_median(rows, name) for name in _MEAN_LENGTHS)
        if prompt is None or response is None:
            tokens = _median(rows, _TOKENS)
            scale = 1.0 if tokens is None else tokens / planned.tokens
            prompt, response = planned.prompts.mean * scale, planned.responses.mean * scale
        longest_prompt = _median(rows, "prompt_length/max") or data.max_prompt_tokens
        longest_response = _median(rows, "response_length/max") or data.max_response_tokens
        return replace(
            planned,
            prompts=Lengths.spread(min(prompt, longest_prompt), longest_prompt),
            responses=Lengths.spread(min(response, longest_response), longest_response),
        )

    @property
    def has_lengths(self) -> bool:
        """Whether the run logged the lengths of its rows."""
        return any(_median(self._rows, name) is not None for name in (*_MEAN_LENGTHS, _TOKENS))

    def searched_on(self, cluster: Cluster, workload: Workload) -> Answer:
        """The plans that a search finds for the settings that the user gave the run, and these rows."""
        trainer, unread = self.plan.composed.trainer, Problems(collects=True)  # secrets are not in a run's record
        typed = with_files([self.run_dir / CONFIG_FILE], [], config_name=trainer, problems=unread)
        _, request = request_on(compose_run(typed, config_name=trainer), cluster)
        return answer(replace(request, workload=workload))

    @cached_property
    def _rows(self) -> list[dict]:
        """The metrics of each step that the run logged."""
        file = self.run_dir / METRICS_FILE
        try:
            if file.exists() and not file.is_file():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return [*rows_by_step(file).values()]
        except OSError as error:
            raise DataError(
                f"The metrics of the run, {file}, cannot be read: {error.strerror or error}.",
                remedy="Restore the file, or remove it: the mean lengths of the rows are then assumed.",
            ) from error

    def _gpu_name(self) -> str | None:
        """The name of the GPUs of the driver's host, as run.log has it; None without any."""
        log = self.run_dir / LOG_FILE
        found = [*_GPUS.finditer(log.read_text(encoding="utf-8", errors="replace"))] if log.is_file() else []
        return found[-1]["name"] if found and found[-1]["name"] != "none" else None


def compared_run(run_dir: Path, devices: str | None = None) -> Comparison:
    """The predicted step of a run on its devices, or on `devices` as in `--on`, next to what it measured."""
    run = RecordedRun(run_dir)
    measured, cluster = run.measured(), run.devices(devices)
    step = run.planned_on(cluster)
    found = run.searched_on(cluster, step.request.workload)
    return compare(step, measured, found, has_lengths=run.has_lengths)


def _composed(run_dir: Path) -> Composed:
    """The configuration of a run with all values that it had, also those that it would now choose again."""
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        folders = [path for folder in (run_dir.parent, Path("runs")) for path in folder.glob("*")]
        near = [str(path) for path in folders if os.path.isfile(path / CONFIG_FILE)]
        raise DataError(
            f"There is no run in '{run_dir}'.",
            remedy=f"{did_you_mean(str(run_dir), near)}Give the directory of a run: trainer.run_dir, by default"
            " runs/<trainer.experiment>.",
        )
    content = file_content(file)
    command = content.pop(COMMAND, None)
    if command is None:
        raise DataError(
            f"'{run_dir}' was started from a configuration of your own (--config-name): its steps cannot be"
            " compared with a prediction.",
            remedy="Give the directory of a run of a training command, with or without run files.",
        )
    found = {key: found_in(run_dir, value) for key, value in content.items()}
    return as_recorded(found, known_command(str(command)).trainer)


def _median(rows: list[dict], name: str) -> float | None:
    """The median of a metric over all steps but the first; None if no step has it."""
    found = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return median(found[1:] or found) if found else None
