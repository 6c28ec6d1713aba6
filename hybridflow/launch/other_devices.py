"""A run that continues on other devices: its plan for them, and what its roles start from."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hybridflow.config.derived import num_devices
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.claim import hold
from hybridflow.elastic.devices import ElasticDevices
from hybridflow.elastic.resuming import CONFIG_FILE
from hybridflow.errors import Problems
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.plan import defaults
from hybridflow.launch.plan.defaults import with_devices
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.prepare import Prepared, checked_length, checked_plan
from hybridflow.observability.whole_files import replace_file

Positions = Mapping[str, dict[str, int]]
"""The position of each stream of a run's data."""


def elastic_devices(prepared: Prepared, look: Callable[[], Sequence[int]]) -> ElasticDevices[RunPlan]:
    """The devices of a run under its plan; `look` returns those of each node that it could have."""
    plan, trainer = prepared.plan, prepared.plan.config.trainer
    asked = num_devices(plan.asked.config) or None  # 0: trainer.devices=auto
    return ElasticDevices(
        trainer.elastic,
        used=num_devices(plan.config),
        most=trainer.elastic.max_devices or asked,
        look=look,
        plan_on=partial(_plan_on, plan),
        size_of=lambda other: num_devices(other.config),
        patience_seconds=trainer.start_timeout_seconds,
    )


def _plan_on(plan: RunPlan, counts: Sequence[int]) -> RunPlan:
    """The plan of the same run for nodes with these numbers of devices; for those that it asks for, the first plan."""
    trainer = plan.asked.config.trainer
    is_asked = list(counts) == [trainer.devices] * trainer.nodes
    problems = Problems(collects=True)  # no warnings: they have been logged when the run began
    with _without_choices():
        found = checked_plan(plan.asked if is_asked else with_devices(plan.asked, counts), problems, before=plan)
    if problems.found:
        raise problems.found[0]
    return found


@contextmanager
def _without_choices() -> Iterator[None]:
    """A block in which defaults that depend on the device are not logged again."""
    choices = logging.getLogger(defaults.__name__)
    level = choices.level
    choices.setLevel(logging.WARNING)
    try:
        yield
    finally:
        choices.setLevel(level)


def prepared_under(plan: RunPlan, prepared: Prepared, positions: Positions) -> Prepared:
    """The same run under another plan, from its newest checkpoint or, without one, from where it started.

    `positions` are those of the data before its first step.
    """
    plan = replace(checked_length(plan, prepared.data), asked=prepared.plan.asked)
    store = CheckpointStore(prepared.directory)
    store.settle()
    checkpoint = store.latest() or prepared.checkpoint
    if checkpoint is not None:
        hold(checkpoint.path)
    for name, stream in prepared.data.streams.items():
        stream.restore(positions[name])
    replace_file(prepared.directory / CONFIG_FILE, config_text(plan.composed))
    return replace(prepared, plan=plan, checkpoint=checkpoint)
