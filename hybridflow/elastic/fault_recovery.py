"""Continues after faults, as the policy of each kind says, and records every fault in faults.jsonl."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridflow.config.faults import KINDS, MOST_IN_STEP, NEVER_SURVIVED, FaultPolicy, Faults, Kind
from hybridflow.config.loop import Trainer
from hybridflow.controller.backends.interface import Respawns
from hybridflow.elastic.fault_costs import FaultCosts
from hybridflow.errors import HybridflowError, RayEnded, WorkerError, WorkerHangs
from hybridflow.observability.fault_ledger import FaultOutcome, append_faults
from hybridflow.observability.formatting import counted

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 10.0
"""How long the other processes may take to leave their calls before they are replaced too."""

_HOUR = 3600.0
_MOST_IN_HISTORY = 5
_MOST_CHARACTERS = 300
"""The length at which the message of a fault is cut in the log."""

_FIRST_PAUSE_SECONDS = 1.0
"""The pause before a step is retried; twice as long before each further retry."""


@dataclass
class FaultHistory:
    """The faults of a run, kept when its workers start again under another plan."""

    recent: deque[float] = field(default_factory=deque)
    """When the faults of the last hour occurred."""

    at_step: Counter[tuple[int, str]] = field(default_factory=Counter)
    """The number of faults by step and kind."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_IN_HISTORY))
    """The latest faults, as the message of the one that ends the run lists them."""
    open: list[dict[str, Any]] = field(default_factory=list)
    """The faults since the run last continued."""
    done: int = 0
    """The number of steps that were done when these occurred."""
    costs: FaultCosts = field(default_factory=FaultCosts)
    """The costs of the faults, on the clock of `time.monotonic`."""


class FaultRecovery:
    """Decides whether a run continues after a fault, and replaces the processes that it has ended.

        except Exception as error:
            if not recovery.can_survive(error, step=8, done=7):
                raise
            is_kept = recovery.replace(has_copy=True)
            ...  # if not kept: restore a snapshot or checkpoint; then publish the weights
            recovery.continued(step=5, source="a copy in memory")

    Call `reached` before each step, so that the cost of a fault can be computed. A fault between `replace` and
    `continued` is handled in the same way. `learner_pools` are the pools with trained models; `pool_of` is the pool
    of each role; `reconnect` connects the actor with a rollout in another pool. Without `respawns`, all workers share
    the driver's process.
    """

    def __init__(
        self,
        calls: Respawns,
        *,
        trainer: Trainer,
        learner_pools: Collection[str],
        pool_of: Mapping[str, str],
        reconnect: Callable[[], None],
        ledger: Path,
        respawns: bool = True,
        history: FaultHistory | None = None,
    ) -> None:
        self._calls = calls
        self._policies = trainer.faults
        self._learner_pools = frozenset(learner_pools)
        self._pool_of = pool_of
        self._reconnect = reconnect
        self._ledger = ledger
        self._most = trainer.max_faults
        self._respawns = respawns
        self._is_supervised = trainer.restarts > 0
        self._fraction = fraction_of_copies(trainer, respawns=respawns)
        self._next_snapshot = 0.0
        self._history = history or FaultHistory()
        self._policy = FaultPolicy.stop
        self._is_kept = True
        self._pools: set[str] = set()
        self._raised_in: set[str] = set()
        """The pools of processes that raised an error and must be replaced."""
        self._in_step = 0
        """The number of faults in the step of the last one."""

    def reached(self, step: int) -> None:
        """Notes that the run is at the state after a step. Has no effect between a fault and `continued`."""
        self._history.costs.reached(step, at=time.monotonic())

    def can_survive(self, error: Exception, *, step: int, done: int) -> bool:
        """Notes a fault in a step, or in the evaluation or saving after it, when `done` steps were done.

        Returns whether the run may continue; if not, the error then says why.
        """
        if not self._most:
            return False
        kind = kind_of(error)
        policy = self._policy_for(error, kind)
        is_first = not self._history.recent
        self._count(kind, step)
        self._history.open.append(self._noted(error, kind, policy, step))
        self._history.done = max(self._history.done, done)
        reason = self._reason_to_end(kind, step)
        if policy is FaultPolicy.stop or reason:
            if isinstance(error, HybridflowError) and not (policy is FaultPolicy.stop and is_first):
                found = reason or f"{counted(len(self._history.recent), 'fault')} within an hour"
                lists = f"{self._ledger} lists them: {'; '.join(self._history.lines)}"
                error.message += f" The run ends here, after {found}; {lists}."
            if isinstance(error, RayEnded) and self._is_supervised:  # the supervisor records this fault
                self._history.open.pop()
            self.ended()
            return False
        logger.warning("fault: %s (step=%d kind=%s policy=%s)", shortened(error), step, kind.name, policy.name)
        self._policy = policy
        self._is_kept &= policy is not FaultPolicy.roll_back
        if policy is FaultPolicy.respawn and isinstance(error, WorkerError) and error.raised:
            self._raised_in |= {self._pool_of[role] for role in error.role.split("+") if role in self._pool_of}
        return True

    def survived(self, error: Exception, *, step: int, seconds: float) -> None:
        """Records a fault of work in the background, such as an upload: it was retried until it succeeded, and has cost
        the run no time."""
        if self._most:
            fault = self._noted(error, kind_of(error), FaultPolicy.retry, step)
            outcome = FaultOutcome(step, repeated_steps=0, seconds=seconds, cost_seconds=0.0)
            append_faults(self._ledger, [fault | outcome.as_row()])

    @property
    def leaves_out_batch(self) -> bool:
        """Whether the batch of the step with the last fault is left out."""
        return self._policy is FaultPolicy.roll_back

    @property
    def is_snapshot_due(self) -> bool:
        """Whether another snapshot leaves the time spent on them below their share."""
        return self._fraction > 0 and time.monotonic() >= self._next_snapshot

    def snapshot_taken(self, seconds: float) -> None:
        """Notes how long a snapshot took."""
        self._next_snapshot = time.monotonic() + seconds * (1 / self._fraction - 1)

    def replace(self, *, has_copy: bool) -> bool:
        """Starts new processes for the pools that have lost one.

        Returns whether the trained models of all pools are as they were after the last step. If not, the caller must
        restore a snapshot or checkpoint; without a copy, all trained models start from scratch.
        """
        if self._policy is FaultPolicy.retry:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (self._in_step - 1))
        broken = self._calls.broken(_LEAVE_SECONDS)
        lost = broken.pools | self._raised_in
        self._is_kept &= broken.is_unchanged and not lost & self._learner_pools
        pools = lost if self._is_kept or has_copy else lost | self._learner_pools
        self._pools |= pools
        if pools:
            logger.info("starting new processes in pool=%s ...", ",".join(sorted(pools)))
        self._calls.respawn(pools)
        self._reconnect()
        return self._is_kept

    @property
    def is_kept(self) -> bool:
        """Whether the trained models of all pools are as they were after the last step."""
        return self._is_kept

    def continued(self, *, step: int, source: str = "", plan: str = "") -> None:
        """Records that the run continues after this many steps, and what each fault has cost.

        `source` is what the trained state was restored from; empty if it was kept. `plan` describes the devices of a
        new plan, if there is one.
        """
        pools, lost = ",".join(sorted(self._pools)), self._history.done - step
        costs = self._history.costs.continued(step, at=time.monotonic())
        outcomes = [FaultOutcome(step, lost, each.seconds, each.cost_seconds, pools, source, plan) for each in costs]
        self._record([outcome.as_row() for outcome in outcomes])
        seconds, cost = costs[0].seconds, sum(each.cost_seconds for each in costs)
        several = "s" if len(costs) > 1 else ""
        done = "rolled back" if self._policy is FaultPolicy.roll_back else "the step is repeated"
        done = f"new processes in pool={pools}" if pools else done
        done = f"a new plan with {plan}" if plan else done
        logger.warning(
            "recovered: %s after %.1f s; the run continues after step %d%s%s. The fault%s cost %.1f s.",
            done, seconds, step, f", from {source}" if source else "",
            f", {counted(lost, 'step')} back" if lost else "", several, cost,
        )  # fmt: skip
        self._is_kept = True
        self._pools.clear()
        self._raised_in.clear()

    def ended(self) -> None:
        """Records that the run ends after the faults since it last continued."""
        self._history.costs.ended()
        self._record([{}] * len(self._history.open))

    def _policy_for(self, error: Exception, kind: Kind) -> FaultPolicy:
        """The policy of the kind, if it is possible in this run."""
        policy = getattr(self._policies, kind.name)
        is_impossible = policy is FaultPolicy.respawn and not self._respawns
        return FaultPolicy.stop if is_impossible or NEVER_SURVIVED & names_of(error) else policy

    def _count(self, kind: Kind, step: int) -> None:
        now = time.monotonic()
        self._history.costs.occurred(at=now)
        while self._history.recent and self._history.recent[0] < now - _HOUR:
            self._history.recent.popleft()
        self._history.recent.append(now)
        self._history.at_step[step, kind.name] += 1
        self._in_step = sum(count for (at, _), count in self._history.at_step.items() if at == step)

    def _reason_to_end(self, kind: Kind, step: int) -> str:
        """The limit that the faults have exceeded; empty if none."""
        if len(self._history.recent) > self._most:
            return f"{counted(len(self._history.recent), 'fault')} within an hour (trainer.max_faults={self._most})"
        if self._in_step > MOST_IN_STEP or self._history.at_step[step, kind.name] > kind.most_in_step:
            return f"{counted(self._in_step, 'fault')} in step {step}"
        return ""

    def _noted(self, error: Exception, kind: Kind, policy: FaultPolicy, step: int) -> dict[str, Any]:
        """A fault as a row of the ledger; adds it to the history."""
        names = ("role", "rank", "node", "method")
        place = {name: vars(error)[name] for name in names} if isinstance(error, WorkerError) else {}
        fault = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), "fault": type(error).__name__}
        message = error.message if isinstance(error, HybridflowError) else str(error)
        stacks = {"stacks": error.worker_traceback.splitlines()} if isinstance(error, WorkerHangs) else {}
        fault |= {"kind": kind.name, "policy": policy.name}
        where = f" of {error.role} rank {error.rank} in {error.method}" if isinstance(error, WorkerError) else ""
        self._history.lines.append(f"step {step}, {kind.name}{where} ({type(error).__name__})")
        return fault | place | {"message": message} | stacks

    def _record(self, outcomes: Sequence[Mapping[str, Any]]) -> None:
        """Writes the faults since the run last continued, each with what became of it."""
        faults = zip(self._history.open, outcomes, strict=True)
        append_faults(self._ledger, [{**fault, **outcome} for fault, outcome in faults])
        self._history.open.clear()
        self._history.done = 0


def fraction_of_copies(trainer: Trainer, *, respawns: bool) -> float:
    """The largest fraction of the time for copies of the trained state; 0 if no policy makes use of them."""
    return trainer.snapshot_fraction if trainer.max_faults and (respawns or _rolls_back(trainer.faults)) else 0.0


def kind_of(error: Exception) -> Kind:
    """The kind of a fault; for an error of a worker, that of the exception raised there."""
    names = names_of(error)
    return next(kind for kind in KINDS if not names.isdisjoint(kind.errors))


def names_of(error: Exception) -> frozenset[str]:
    """The names of the classes of an error and, for an error of a worker, of the exception raised there."""
    raised = error.raised if isinstance(error, WorkerError) else ()
    return frozenset(raised) | {kind.__name__ for kind in type(error).__mro__}


def shortened(error: Exception) -> str:
    """The message of an error on one line, without its remedy."""
    message = " ".join((error.message if isinstance(error, HybridflowError) else repr(error)).split())
    return message if len(message) <= _MOST_CHARACTERS else f"{message[:_MOST_CHARACTERS]}..."


def _rolls_back(policies: Faults) -> bool:
    """Whether a fault in the driver's own process may need an earlier state."""
    return any(getattr(policies, kind.name) in (FaultPolicy.retry, FaultPolicy.roll_back) for kind in KINDS)
