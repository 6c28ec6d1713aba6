"""How the run ended: as it recorded itself, the errors in its log, and the faults of workers that came before."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hybridflow.doctor.finding import Finding, Status, ok, problem, warning
from hybridflow.doctor.run.directory import RunDirectory
from hybridflow.doctor.run.kills import kills
from hybridflow.observability.ending import ENDING_FILE, read_ending, split_remedy
from hybridflow.observability.fault_ledger import FAULTS_FILE, read_faults
from hybridflow.observability.formatting import counted, spoken_duration

_STEP = "timing_s/step"
_MUCH = 0.1
"""The share of a run's time above which the cost of faults is a reason to look for their cause."""

_READ = "Read the traceback on the console, or start the run again to see it."


def ending(run: RunDirectory) -> Iterator[Finding]:
    """How it ended."""
    if run.is_alive:
        return
    if (run.path / ENDING_FILE).exists() and read_ending(run.path) is None:
        yield warning("ending", f"{ENDING_FILE} cannot be read")
    if run.ending is not None and run.ending.how != "failed":
        yield ok("ending", f"{run.ending.how}: {run.ending.said}")
    elif run.ending is not None:
        yield _failure("ending", run.ending.said)
    elif not run.last_step and not run.has_begun:
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
    last, recorded = run.logged_failure, " ".join(run.ending.said.split()) if run.ending else ""
    if last and last != recorded:
        yield _failure("last start", last)


def _failure(name: str, said: str) -> Finding:
    found, remedy = split_remedy(said)
    first, *others = found.splitlines()
    return problem(name, f"failed: {first}", remedy or _READ, others)


def _doing(run: RunDirectory) -> str:
    is_saving = run.last_step > 0 and run.last_step in run.unfinished_saves
    if is_saving:
        return f"while it saved step {run.last_step}"
    is_last = run.last_step == run.setting("trainer.total_steps")
    return "after its last step" if is_last else f"in step {run.last_step + 1}"


def _when(run: RunDirectory) -> str:
    return f" at about {run.last_sign:%Y-%m-%d %H:%M:%S}" if run.last_sign else ""


def faults(run: RunDirectory) -> Iterator[Finding]:
    """The faults of workers: the last one with its role, rank and call, and what became of it."""
    if run.unread_faults:
        yield warning("ledger", f"{counted(run.unread_faults, 'line')} of {FAULTS_FILE} cannot be read")
    if not run.faults:
        return
    last, survived = run.faults[-1], sum("resumed_step" in fault for fault in run.faults)
    place = f"{last.get('role')} rank {last.get('rank')} on {last.get('node')} in {last.get('method')}"
    place = place if "role" in last else "in the run's own process"
    after = "which ended the run"
    if "resumed_step" in last:
        after = f"the run continued after step {last['resumed_step']}"
    lost = sum(fault.cost_seconds for fault in read_faults(run.path))
    spent = lost + sum(seconds for row in run.rows.values() if isinstance(seconds := row.get(_STEP), float))
    cost = f", which cost {spoken_duration(lost)} ({lost / spent:.0%} of the time)" if lost else ""
    found = (
        f"{counted(len(run.faults), 'fault')}, {survived} survived{cost}; the last in step"
        f" {last.get('step')}, {last.get('fault')}: {place}, {after}"
    )
    node, role = (_common(run.faults, name) for name in ("node", "role"))
    if node or (len(run.faults) > 1 and lost > _MUCH * spent):
        common = f": {node or role}" if node or role else ""
        yield warning("faults", found, f"Look for a common cause in {run.path / FAULTS_FILE}{common}.")
    elif survived < len(run.faults):
        yield warning("faults", found, f"Read {run.path / FAULTS_FILE}, which has the details.")
    else:
        yield ok("faults", found)


def _common(faults: Sequence[Mapping[str, object]], name: str) -> str:
    """The node or role of most faults, in words; empty if there is none, or no fault of another one."""
    values = Counter(str(fault[name]) for fault in faults if fault.get(name))
    value, count = values.most_common(1)[0] if values else ("", 0)
    is_common = len(values) > 1 and count > len(faults) // 2
    return f"{count} of {len(faults)} faults were of {name} {value}" if is_common else ""
