"""Everything that can fail before the first process starts, in the order in which it can be checked."""

import logging
from dataclasses import dataclass
from pathlib import Path

from hybridflow.elastic.checkpoint import Checkpoint
from hybridflow.elastic.compatibility import Fingerprints
from hybridflow.errors import STRICT, HybridflowError, Problems
from hybridflow.launch.automatic import plan_fully
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.data import RunData, load_data
from hybridflow.launch.plan.length import length_in_words, with_length
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.resume import fingerprints
from hybridflow.launch.rules.all import DATA_RULES, LENGTH_RULES, PLAN_RULES
from hybridflow.launch.run_directory import EarlierRun, open_directory, start_in_words
from hybridflow.launch.step_trace import step_problems
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.provenance import log_start

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A run that may start: its plan, its data, its directory, and the checkpoint to resume from."""

    plan: RunPlan
    data: RunData
    directory: Path
    checkpoint: Checkpoint | None
    inputs: Fingerprints
    """Fingerprints of the files that the run reads, for its checkpoints."""
    earlier: EarlierRun
    """The directory's earlier contents, restored if the run cannot begin."""


def prepare(composed: Composed) -> Prepared:
    """Plans a run, checks the plan and the data by all rules, and only then opens the run directory."""
    begin_log()
    return prepare_planned(checked_plan(composed))


def begin_log() -> None:
    """Shows log lines, and says which versions run."""
    configure_logging(None)
    log_start()


def prepare_planned(plan: RunPlan, problems: Problems = STRICT) -> Prepared:
    """Checks the data of a planned run by all rules, and opens the run directory.

    With `problems` that collect, all problems are found before the first of them is raised.
    """
    data = checked_data(plan, problems)
    plan = checked_length(plan, data, problems)
    if problems.found:
        with problems.caught():
            start_in_words(plan, data)
        raise problems.found[0]
    if (length := length_in_words(plan, data)) is not None:
        logger.info("%s", length)
    inputs = fingerprints(plan)
    checkpoint, earlier = open_directory(plan, data, inputs)
    return Prepared(plan, data, earlier.directory, checkpoint, inputs, earlier)


def checked_plan(
    composed: Composed, problems: Problems = STRICT, *, device: str | None = None, before: RunPlan | None = None
) -> RunPlan:
    """The plan of a run, checked by all rules that need no data; for `device` see `plan_run`, for `before`
    `plan_fully`."""
    plan = plan_fully(composed, problems, device=device, before=before)
    problems.check(PLAN_RULES, plan)
    if composed.config.trainer.epochs is None:
        problems.check(LENGTH_RULES, plan)
    return plan


def checked_length(plan: RunPlan, data: RunData, problems: Problems = STRICT) -> RunPlan:
    """The plan with the total steps that `trainer.epochs` gives, if it is set, checked by the rules on them."""
    if plan.config.trainer.epochs is None or not plan.config.trainer.total_steps:
        return plan
    plan = with_length(plan, data)
    problems.check(LENGTH_RULES, plan)
    return plan


def checked_data(plan: RunPlan, problems: Problems = STRICT) -> RunData:
    """The data of a run, which the dataflow's step, the reward functions and the layouts can handle."""
    of_step = [step_problems] if plan.config.trainer.total_steps else []
    try:
        data = load_data(plan)
    except HybridflowError:
        problems.check([*of_step, *DATA_RULES], plan, None)
        raise
    if of_step:
        problems.check(of_step, plan, data.streams["prompts"].peek())
    problems.check(DATA_RULES, plan, data)
    return data
