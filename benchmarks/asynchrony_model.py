"""A run with partial rollouts on a virtual clock: the real `GroupQueue`, and engines that only count tokens.

    python benchmarks/asynchrony_model.py --groups 8 --tail 10 --learn-seconds 0.5

Every running group gets a token per decoding step, which takes the same time however many run: generation is bound by
the memory of the weights. A group has finished when its longest sample has. Prints one JSON line.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from hybridflow.dataflows.groups import TURN_TOKENS, GroupQueue, GroupState


@dataclass(frozen=True)
class SimulatedStep:
    """A training step."""

    seconds: float
    rollout_seconds: float
    """How long the rollout has generated."""

    uids: tuple[int, ...]
    """The groups it has trained on."""

    staleness: int
    """The staleness of its oldest token."""

    dropped: tuple[int, ...]
    """Groups that were given up before it."""

    in_flight: int
    """The most groups that have begun and that no step has trained on."""


def simulated(
    tokens_of: Callable[[int], int],
    queue: GroupQueue,
    *,
    token_seconds: float = 1.0,
    learn_seconds: float = 0.0,
    overlaps: bool = True,
    deadline_tokens: int | None = None,
) -> list[SimulatedStep]:
    """The steps of a run whose group `uid` takes `tokens_of(uid)` decoding steps.

    `overlaps`: the rollout generates while a step learns. Groups that pass their deadline are replaced.
    """
    run = _Simulation(tokens_of, queue)
    found: list[SimulatedStep] = []
    for step in range(queue.total_steps):
        decoded, run.dropped, run.in_flight = 0, [], 0
        while (chosen := queue.chosen(step)) is None:
            run.begin(step, deadline_tokens)
            decoded += run.decode(TURN_TOKENS)
        seconds = decoded * token_seconds + learn_seconds
        if overlaps:
            run.begin(step, deadline_tokens)
            decoded += run.decode(int(learn_seconds / token_seconds))
        uids = tuple(sorted(group.uid for group in chosen))
        staleness = step - min(group.version for group in chosen)
        queue.remove(chosen)
        busy = decoded * token_seconds
        found.append(SimulatedStep(seconds, busy, uids, staleness, tuple(run.dropped), run.in_flight))
    return found


class _Simulation:
    """The state between two decoding steps."""

    def __init__(self, tokens_of: Callable[[int], int], queue: GroupQueue) -> None:
        self.queue = queue
        self.dropped: list[int] = []
        self.in_flight = 0
        self._tokens_of = tokens_of
        self._drawn = 0

    def begin(self, step: int, deadline_tokens: int | None) -> None:
        """Gives up groups that are too old or too late, and lets others begin; as `Stream._send`."""
        queue = self.queue
        gone = queue.stale(step)
        if deadline_tokens is not None:
            gone += [group for group in queue.overdue(deadline_tokens) if group not in gone]
        queue.remove(gone)
        self.dropped += [group.uid for group in gone]
        while len(queue.of(GroupState.waiting)) < queue.room(step):
            queue.add(range(self._drawn, self._drawn + queue.groups_per_step))
            self._drawn += queue.groups_per_step
        queue.admit(step)
        self.in_flight = max(self.in_flight, len(queue.of(GroupState.running, GroupState.done)))

    def decode(self, most: int) -> int:
        """Decodes until no group runs, for at most so many steps; returns how many were taken."""
        running = self.queue.of(GroupState.running)
        left = [self._tokens_of(group.uid) - group.decode_steps for group in running]
        taken = min(most, max(left, default=0))
        for group, tokens in zip(running, left, strict=True):
            group.decode_steps += taken
            if tokens <= taken:
                self.queue.finish(group.uid, group.version)
        return taken


def mean_seconds(steps: list[SimulatedStep], *, skipped: int = 0) -> float:
    """Mean seconds of a step after the first ones."""
    return sum(step.seconds for step in steps[skipped:]) / len(steps[skipped:])


def tailed(share: float, short: int, long: int, *, seed: int = 0) -> Callable[[int], int]:
    """Lengths of groups, of which a share is long, drawn by their `uid`."""
    return lambda uid: long if random.Random(f"{seed}/{uid}").random() < share else short


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--share", type=float, default=1 / 8)
    parser.add_argument("--short", type=int, default=20)
    parser.add_argument("--tail", type=int, default=10, help="how many times longer a long group is")
    parser.add_argument("--token-seconds", type=float, default=0.01)
    parser.add_argument("--learn-seconds", type=float, default=0.5)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=1)
    given = parser.parse_args()
    lengths = tailed(given.share, given.short, given.short * given.tail)
    alone = GroupQueue(given.groups, 0, 0, given.steps)
    ahead = GroupQueue(given.groups, min(given.ahead, given.staleness), given.staleness, given.steps)
    token, learn = given.token_seconds, given.learn_seconds
    synchronous = simulated(lengths, alone, overlaps=False, token_seconds=token, learn_seconds=learn)
    partial = simulated(lengths, ahead, token_seconds=token, learn_seconds=learn)
    seconds = {"synchronous": mean_seconds(synchronous), "partial": mean_seconds(partial)}
    print(json.dumps({**vars(given), **seconds, "speed_up": round(seconds["synchronous"] / seconds["partial"], 3)}))


if __name__ == "__main__":
    main()
