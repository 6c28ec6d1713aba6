"""A run whose checkpoint has all of its steps: if it is started again, nothing is left to do but to say so."""

from contextlib import ExitStack

from hybridflow.config.derived import num_devices
from hybridflow.dataflows.run import Outcome
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.claim import release
from hybridflow.elastic.retention import Retention
from hybridflow.launch.assemble import mirror_of
from hybridflow.launch.messages import Finished, ending_of
from hybridflow.launch.opened_run import note_restart
from hybridflow.launch.prepare import Prepared
from hybridflow.launch.reporting import Reporting
from hybridflow.launch.supervised import Start


def finished_before(prepared: Prepared, start: Start | None) -> Finished | None:
    """The ending of a run that had done and evaluated all of its steps; None if something is left to do.

    Starts no process. Writes the report, and copies what the checkpoint's URL lacks, since the earlier process may have
    ended before it could. `start` is that of a supervised run.
    """
    trainer, checkpoint, directory = prepared.plan.config.trainer, prepared.checkpoint, prepared.directory
    if checkpoint is None or not trainer.total_steps or checkpoint.step < trainer.total_steps:
        return None
    state = checkpoint.driver_state()
    if state.get("unlogged") is not None:  # its evaluation was interrupted
        return None
    step = checkpoint.step
    with ExitStack() as stack:
        stack.callback(release, directory)
        if start is not None and start.number:
            note_restart(directory, start, step=step, total=step)
        world = num_devices(prepared.plan.config)
        store = CheckpointStore(directory, keep=Retention.of(trainer), world=world)
        if (mirror := mirror_of(trainer, store, stack)) is not None:
            mirror.finish()
        first, last = state.get("evaluated", (0, step))
        outcome = Outcome(step, state["evaluation"], checkpoint.path, evaluated=(first, last))
        ending = ending_of(outcome, directory, trainer.resume)
        report = Reporting(prepared).end(ending)
    return Finished(outcome, ending, directory, report, state["first_evaluation"])
