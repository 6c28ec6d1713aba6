"""The run and its settings, and the command that started it."""

from collections.abc import Iterator

from hybridflow.doctor.finding import Finding, ok, warning
from hybridflow.doctor.run.directory import RunDirectory
from hybridflow.elastic.resuming import CONFIG_FILE
from hybridflow.errors import DataError
from hybridflow.observability.formatting import counted
from hybridflow.observability.log_lines import damaged_lines
from hybridflow.observability.logs import LOG_FILE


def settings(run: RunDirectory) -> Iterator[Finding]:
    """The dataflow, model, engines and length."""
    try:
        is_known = bool(run.config)
    except DataError as error:
        yield warning("settings", error.message.rstrip("."))
        return
    if not is_known:
        yield warning("settings", f"there is no {CONFIG_FILE}")
        return
    engines = f"{run.setting('actor.engine')} training, {run.setting('rollout.engine') or 'transformers'} rollout"
    where = f"{run.setting('trainer.devices')} x {run.setting('trainer.device')}"
    if (nodes := run.setting("trainer.nodes")) not in (None, 1):
        where += f" on {nodes} nodes"
    steps = f"step {run.last_step} of {run.setting('trainer.total_steps')}"
    yield ok("settings", f"{run.setting('dataflow')}, {run.setting('model.path')}, {engines}, {where}; {steps}")


def command(run: RunDirectory) -> Iterator[Finding]:
    """The latest start."""
    if damaged := damaged_lines(run.path / LOG_FILE):
        yield warning("log", f"{counted(damaged, 'line')} of {LOG_FILE} cannot be read")
    start = run.start
    if start is None:
        yield warning("started", f"{LOG_FILE} does not say when and how the run was started")
        return
    where = f"on {start.host} as process {start.pid} in {start.directory}"
    yield ok("started", f"{start.time:%Y-%m-%d %H:%M:%S} {where}: {start.command}")
