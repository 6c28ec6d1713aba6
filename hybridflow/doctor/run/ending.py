"""How the run ended: as it recorded itself, the errors in its log, and the faults of workers that came before."""

from collections.abc import Iterator

from hybridflow.doctor.finding import Finding, Status, ok, problem, warning
from hybridflow.doctor.run.directory import RunDirectory
from hybridflow.doctor.run.kills import kills
from hybridflow.observability.ending import UNRECORDED, split_remedy
from hybridflow.observability.fault_ledger import FAULTS_FILE
from hybridflow.observability.formatting import counted

_FAILED = "failed: "
_BEGUN = "all roles have started"
_READ = "Read the traceback on the console, or start the run again to see it."


def ending(run: RunDirectory) -> Iterator[Finding]:
    """How it ended."""
    if run.is_alive:
        return
    if run.ending is not None and run.ending.how != "failed":
        yield ok("ending", f"{run.ending.how}: {run.ending.said}")
    elif run.ending is not None:
        yield _failure("ending", run.ending.said)
    elif not run.last_step and not any(line.message.startswith(_BEGUN) for line in run.lines):
        yield problem("ending", f"ended while it started{_when(run)}, without recording why", _READ)
    else:
        is_explained = any(finding.status is Status.problem for finding in kills(run))
        yield problem(
            "ending",
            f"was killed {_doing(run)}{_when(run)}, before it could record why",
            ""
            if is_explained
            else "Find out what killed it, so that it does not happen again: see the lines above, and the log of your"
            " batch system or container (a time limit, preemption, exit status 137).",
        )
    yield from _later_attempt(run)


def _later_attempt(run: RunDirectory) -> Iterator[Finding]:
    """A later start in the directory that failed before it could begin, which leaves the earlier ending in place."""
    errors = [line.message for line in run.lines if line.level == "ERROR" and line.message.startswith(_FAILED)]
    last = errors[-1].removeprefix(_FAILED) if errors else ""
    recorded = " ".join(run.ending.said.split()) if run.ending else ""
    if last and last not in (recorded, UNRECORDED.said):
        yield _failure("last start", last)


def _failure(name: str, said: str) -> Finding:
    found, remedy = split_remedy(said)
    first, *others = found.splitlines()
    return problem(name, f"failed: {first}", remedy or _READ, others)


def _doing(run: RunDirectory) -> str:
    is_saving = run.last_step > 0 and run.last_step in run.unfinished_saves
    return f"while it saved step {run.last_step}" if is_saving else f"in step {run.last_step + 1}"


def _when(run: RunDirectory) -> str:
    return f" at about {run.last_sign:%Y-%m-%d %H:%M:%S}" if run.last_sign else ""


def faults(run: RunDirectory) -> Iterator[Finding]:
    """The faults of workers: the last one with its role, rank and call, and what became of it."""
    if not run.faults:
        return
    last, survived = run.faults[-1], sum("resumed_step" in fault for fault in run.faults)
    place = f"{last.get('role')} rank {last.get('rank')} on {last.get('node')} in {last.get('method')}"
    place = place if "role" in last else "in the run's own process"
    after = "which ended the run"
    if "resumed_step" in last:
        after = f"after which the run continued from step {last['resumed_step']} within {last.get('seconds')} s"
    yield warning(
        "faults",
        f"{counted(len(run.faults), 'fault')}, {survived} survived; the last in step"
        f" {last.get('step')}, {last.get('fault')}: {place}, {after}",
        f"Read {run.path / FAULTS_FILE}: faults of one role or node have one cause.",
    )
