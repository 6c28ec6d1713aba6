"""All that can fail before the first process starts, in the order in which it can be known."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.derived import run_dir as run_dir_of
from hybridflow.dataflows.interface import Dataflow, role_needs
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.claim import claim, release
from hybridflow.elastic.compatibility import Fingerprints
from hybridflow.elastic.recovery import check_links, resolve_resume, set_aside, set_later_aside, warn_of_complete
from hybridflow.errors import STRICT, Faults, HybridflowError
from hybridflow.launch.checked_plan import RunPlan, plan_run
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.earlier_run import EarlierRun
from hybridflow.launch.inputs import fingerprints
from hybridflow.launch.plan.data_streams import DrivenData, load_data
from hybridflow.launch.plan.old_logprobs import say_old_logprobs, with_old_logprobs_said
from hybridflow.launch.plan.roles import CRITIC, generates
from hybridflow.launch.resumption import Changes, check_resumable
from hybridflow.launch.rules.batches import evaluation_errors
from hybridflow.launch.rules.disk_space import check_room
from hybridflow.launch.rules.preflight import check_rewards
from hybridflow.launch.rules.unused_settings import warn_of_unread
from hybridflow.launch.shared_storage import check_outlives_job
from hybridflow.launch.step_trace import check_step
from hybridflow.observability.ending import UNRECORDED, is_unrecorded
from hybridflow.observability.logs import configure_logging

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Prepared:
    """A run that may start: what it needs, its data, its directory, and the checkpoint to go on from."""

    plan: RunPlan
    data: DrivenData
    directory: Path
    checkpoint: Checkpoint | None
    inputs: Fingerprints
    """Fingerprints of the files that the run reads, for its checkpoints."""
    earlier: EarlierRun
    """What was in the directory, to be put back if the run cannot begin."""


def prepare(composed: Composed) -> Prepared:
    """Checks what was composed against models, data and functions; only then the run directory is touched."""
    configure_logging(None)
    plan = plan_run(composed)
    tell(plan)
    data = read_data(plan)
    directory = check_directory(plan)
    inputs = fingerprints(plan.composed, plan.specs)
    trained = [spec.name for spec in plan.specs if spec.is_trained]
    told = with_old_logprobs_said(plan.composed, plan.dataflow)
    checkpoint, earlier = _open_directory(told, inputs, directory, data, trained)
    return Prepared(plan, data, directory, checkpoint, inputs, earlier)


def check_directory(plan: RunPlan) -> Path:
    """The run's directory, which can be written and has room for its checkpoints."""
    directory = run_dir_of(plan.config)
    check_outlives_job(directory)
    check_links(directory)
    check_room(plan.config, plan.specs, directory)
    return directory


def tell(plan: RunPlan) -> None:
    """Logs what a user may not expect of the plan."""
    config, dataflow = plan.config, plan.dataflow
    if not config.trainer.save_every:
        logger.warning("trainer.save_every=0: no checkpoint is written, so the trained model is not kept")
    warn_of_unread(plan.composed, dataflow, plan.specs)
    warn_of_followed(plan.composed, dataflow)
    say_old_logprobs(config, dataflow)


def read_data(plan: RunPlan, faults: Faults = STRICT) -> DrivenData:
    """Reads the data, and checks the dataflow's step, the reward functions and the layouts with it."""
    config, specs, dataflow = plan.config, plan.specs, plan.dataflow
    is_judged = generates(config, dataflow) and "reward" in {spec.name for spec in specs}
    try:
        data = load_data(config, dataflow, is_judged=is_judged)
    except HybridflowError:
        with faults.caught():
            check_rewards(specs, columns=None)
        raise
    with faults.caught():
        check_step(config, data.streams["prompts"].peek())
    with faults.caught():
        check_rewards(specs, data.judged_columns)
    questions = 0 if data.questions is None else len(data.questions)
    sources = [] if data.held_out is None else data.held_out.object("data_source")
    faults.add(*evaluation_errors(config, specs, questions=questions, sources=sources))
    return data


def warn_of_followed(composed: Composed, dataflow: type[Dataflow]) -> None:
    """Warns of minibatch sizes that were set to the user's batch size: learning rates do not follow."""
    flat = composed.flat()
    for key, origin in composed.origins.items():
        role = key.partition(".")[0]
        if origin == "data.batch_size" and (role != CRITIC or CRITIC in role_needs(dataflow)):
            rate = f"{role}.optimizer.learning_rate"
            logger.warning(
                "%s=%s was set to data.batch_size=%s; %s=%s was chosen for larger minibatches, and may be too high",
                key, flat[key], flat[origin], rate, flat[rate],
            )  # fmt: skip


def _open_directory(
    composed: Composed, inputs: Fingerprints, directory: Path, data: DrivenData, trained: Collection[str]
) -> tuple[Checkpoint | None, EarlierRun]:
    """Opens the run directory, claimed for this process, with its log and configuration.

    Returns the checkpoint to resume from, and what was in the directory.
    """
    claim(directory)
    earlier = EarlierRun(directory)
    try:
        return _opened_directory(earlier, composed, inputs, data, trained), earlier
    except BaseException:
        earlier.restore()
        release(directory)
        raise


def _opened_directory(
    earlier: EarlierRun, composed: Composed, inputs: Fingerprints, data: DrivenData, trained: Collection[str]
) -> Checkpoint | None:
    trainer, directory = composed.config.trainer, earlier.directory
    store = CheckpointStore(directory, keep=trainer.keep_checkpoints)
    store.settle()
    checkpoint = resolve_resume(trainer.resume, store, trainer.total_steps)
    if is_unrecorded(directory):
        logger.warning("run_dir=%s: of the run here before, %s", directory, UNRECORDED.said.partition(". What")[0])
    changes = Changes()
    if checkpoint is not None:
        changes = check_resumable(checkpoint, composed, inputs, data.streams, trained)
        warn_of_complete(checkpoint, trainer.total_steps)
    if checkpoint is not None and store.is_own(checkpoint.path):
        earlier.later = set_later_aside(store, checkpoint)
        earlier.files = {path: path.read_bytes() for path in [directory / CONFIG_FILE] if path.is_file()}
    elif (aside := set_aside(directory)) is not None:  # what was there has another history
        earlier.aside = aside
        claim(directory)
    configure_logging(directory)
    changes.log()
    (directory / CONFIG_FILE).write_text(config_text(composed))
    return checkpoint
