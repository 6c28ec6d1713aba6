"""Running ahead: the order of calls, staleness, accounts, replay, resuming, and learning."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.config.algorithm import Algorithm, Correction, CorrectionLevel, OldLogprobs
from hybridflow.config.asynchrony import Asynchrony
from hybridflow.config.faults import FaultPolicy, Faults
from hybridflow.config.loop import Trainer
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.data.loader import BatchStream
from hybridflow.data.order import Epochs
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import NoSettings
from hybridflow.dataflows.ledger import weighted
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.remax import ReMax
from hybridflow.dataflows.run import Run
from hybridflow.dataflows.safe_rlhf import SafeRLHF
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.fault_recovery import FaultRecovery
from hybridflow.elastic.retention import Retention
from hybridflow.errors import BatchError, NumericError
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.trace import CallTrace
from tests.unit.dataflows.programs import Notebook, calculator_prompts, local_roles, numbers, weights
from tests.unit.dataflows.test_algorithms import function
from tests.unit.dataflows.test_loop import decoder

STEPS = 6
SAMPLES = 2
ALGORITHMS = {GRPO: "grpo", DAPO: "grpo", ReMax: "remax", PPO: "gae", SafeRLHF: "gae"}


def logged(kind):
    """The dataflow, with a record of the calls of its halves: the uids and the version at the time."""

    class Logged(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.halves, self.published = [], 0

        def collect(self, prompts):
            self.halves.append(("collect", self.iteration, self.published, prompts.row("uid").tolist()))
            return super().collect(prompts)

        def learn(self, batch):
            self.halves.append(("learn", self.iteration, self.published, batch.row("uid").unique().tolist()))
            metrics = super().learn(batch)
            self.published = self.iteration + 1
            return metrics

    return Logged


def run_of(
    directory: Path,
    run_dir: Path,
    kind=GRPO,
    *,
    staleness=1,
    ahead=1,
    steps=STEPS,
    save_every=0,
    **further,
) -> Run:
    old = further.get("old") or (OldLogprobs.rollout if staleness else OldLogprobs.auto)
    weights_of = CorrectionLevel.token if old is OldLogprobs.interpolate else CorrectionLevel.none
    algorithm = Algorithm(advantage=ALGORITHMS[kind], old_logprobs=old, correction=Correction(weights=weights_of))
    run_dir.mkdir(exist_ok=True)
    costs = [function(run_dir, "long", "float(len(ids))")] if kind is SafeRLHF else []
    rewards = [function(run_dir, "odd", further.get("reward", "float(ids[0] % 2)"))]
    further = {"max_staleness": staleness, "costs": costs, "rewards": rewards}
    roles = local_roles(directory, algorithm=algorithm, **further)
    settings = kind.Settings() if kind.Settings is not NoSettings else NoSettings()
    program = logged(kind)(roles.groups | {"reference": None}, settings=settings, samples_per_prompt=SAMPLES)
    program.wants_old_logprobs = False
    stream = BatchStream(calculator_prompts(directory, 10), 4, Epochs(10, 0, shuffle=True))
    program.streams = {"prompts": stream}
    learners = {name: roles.groups[name] for name in ("actor", "critic", "cost_critic") if name in roles.groups}
    if ALGORITHMS[kind] != "gae":
        learners = {"actor": learners["actor"]}
    return Run(
        trainer=Trainer(total_steps=steps, eval_every=0, save_every=save_every, samples_every=0, async_save=False),
        dataflow=program,
        streams={"prompts": stream},
        evaluations=[],
        tracker=Notebook(),
        timers=StageTimers(),
        checkpoints=CheckpointStore(run_dir, keep=Retention(99)),
        learners=learners,
        policies=[roles.groups["actor"]],
        decode=decoder(directory),
        trace=CallTrace(roles.backend.drain_calls, {"main": 1}),
        num_devices=1,
        config={"trainer.seed": 0},
        calls=roles.backend,
        asynchrony=Asynchrony(max_staleness=staleness, ahead=ahead),
    )


def consumed(run: Run) -> Counter[int]:
    return Counter(uid for half, _, _, uids in run.dataflow.halves if half == "learn" for uid in uids)


def same(left: Run, right: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


@pytest.mark.parametrize(("kind", "steps"), [(GRPO, 20), (PPO, 20), (DAPO, 8), (ReMax, 8), (SafeRLHF, 8)])
def test_t1_without_staleness_the_loop_takes_the_steps_that_are_called_by_hand(toy_dir, tmp_path, kind, steps):
    by_loop = run_of(toy_dir(), tmp_path / "loop", kind, staleness=0, steps=steps)
    Loop(by_loop).run()
    by_hand = run_of(toy_dir(), tmp_path / "hand", kind, staleness=0, steps=steps)
    by_hand.policies[0].publish_weights(version=0).result()
    rows = {}
    for step in range(steps):
        by_hand.dataflow.iteration = step
        metrics = by_hand.dataflow.step(by_hand.streams["prompts"].next())
        rows[step + 1] = {n: m.value for n, m in metrics.items() if not n.startswith("timing_s/")}
    assert same(by_loop, by_hand)
    found = numbers(by_loop)
    assert {step: {name: found[step][name] for name in row} for step, row in rows.items()} == rows
    assert by_loop.dataflow.halves == by_hand.dataflow.halves
    assert not any(name.startswith("async/") for row in found.values() for name in row)


def test_the_batch_of_step_i_plus_d_is_collected_before_step_i_is_learnt(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path, staleness=1)
    Loop(run).run()
    order = [(half, step) for half, step, _, _ in run.dataflow.halves]
    first = [("collect", 0), ("collect", 1), ("learn", 0)]
    assert order == first + [pair for step in range(2, STEPS) for pair in (("collect", step), ("learn", step - 1))] + [
        ("learn", STEPS - 1)
    ]
    stale = [row["async/staleness/max"] for row in numbers(run).values()]
    assert stale == [0.0] + [1.0] * (STEPS - 1)


DEPTHS = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (4, 9), (7, 7)]


@pytest.mark.parametrize(
    ("kind", "staleness", "ahead"),
    [
        *((GRPO, *depth) for depth in DEPTHS),
        *(pytest.param(DAPO, *depth, marks=[] if depth in ((1, 5), (3, 2)) else pytest.mark.slow) for depth in DEPTHS),
    ],
)
def test_no_sample_is_older_than_allowed_and_each_prompt_is_trained_on_once(toy_dir, tmp_path, kind, staleness, ahead):
    run = run_of(toy_dir(), tmp_path, kind, staleness=staleness, ahead=ahead)
    Loop(run).run()
    depth = min(staleness, ahead)
    rows = [numbers(run)[step] for step in range(1, STEPS + 1)]
    found = [row["async/staleness/max"] for row in rows]
    assert max(found) <= depth
    if kind is GRPO:  # the groups of DAPO may all be refills
        assert found == [min(step, depth) for step in range(STEPS)]
    assert max(consumed(run).values()) == 1
    if kind is GRPO:
        assert sorted(consumed(run)) == list(range(4 * STEPS))
    last = rows[-1]
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] + last["async/tokens/discarded"] > 0
    assert last["async/groups/consumed"] == 4 * STEPS
    assert last["async/groups/done"] == last["async/groups/running"] == 0
    assert rows[0]["async/groups/done"] == 4 * min(depth, STEPS - 1)


def test_old_logprobs_are_interpolated_once_samples_are_two_versions_old(toy_dir, tmp_path):
    runs = {}
    for old in (OldLogprobs.rollout, OldLogprobs.interpolate):
        runs[old] = run_of(toy_dir(), tmp_path / old.name, staleness=2, ahead=2, old=old)
        Loop(runs[old]).run()
    by_rollout, interpolated = (
        [row["actor/grad_norm"] for _, row in sorted(numbers(run).items()) if "actor/grad_norm" in row]
        for run in runs.values()
    )
    assert interpolated[:2] == pytest.approx(by_rollout[:2], rel=1e-5)  # no sample is older than one version yet
    assert interpolated[2] != pytest.approx(by_rollout[2], rel=1e-5)
    means = [row["rollout_corr/rollout_is_mean"] for row in numbers(runs[OldLogprobs.interpolate]).values()]
    assert means[:2] == pytest.approx([1.0, 1.0]) and means[2] != 1.0


@pytest.mark.parametrize(
    "kind", [GRPO, PPO, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (ReMax, SafeRLHF)), DAPO]
)
def test_an_asynchronous_run_replays_bit_for_bit(toy_dir, tmp_path, kind):
    runs = [run_of(toy_dir(), tmp_path / str(number), kind, staleness=2, ahead=2) for number in range(2)]
    for run in runs:
        Loop(run).run()
    assert same(*runs) and numbers(runs[0]) == numbers(runs[1])
    assert runs[0].dataflow.halves == runs[1].dataflow.halves


@pytest.mark.parametrize(
    "kind", [GRPO, *(pytest.param(k, marks=pytest.mark.slow) for k in (PPO, ReMax, SafeRLHF)), DAPO]
)
def test_t6_a_run_that_resumes_after_any_step_is_the_run_that_was_not_interrupted(toy_dir, tmp_path, kind):
    whole = run_of(toy_dir(), tmp_path / "whole", kind, staleness=2, ahead=2, save_every=1)
    Loop(whole).run()
    for step in range(1, STEPS):
        again = run_of(toy_dir(), tmp_path / f"again_{step}", kind, staleness=2, ahead=2)
        loop = Loop(again)
        checkpoint = whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / f"step_{step}")
        state = checkpoint.driver_state()["ahead"]
        assert [entry["step"] for entry in state["batches"]] == list(range(step, min(step + 2, STEPS)))
        assert all(row["state"] == "done" for row in state["groups"])
        loop.resume(checkpoint)
        loop.run()
        assert numbers(again) == {n: row for n, row in numbers(whole).items() if n > step}
        assert same(again, whole)
        learnt = [call for call in whole.dataflow.halves if call[0] == "learn" and call[1] >= step]
        assert [call for call in again.dataflow.halves if call[0] == "learn"] == [
            (half, at, again_at, uids)
            for (half, at, _, uids), again_at in zip(learnt, [0, *range(step + 1, STEPS)], strict=True)
        ]


def test_batches_that_were_running_are_asked_again_and_each_prompt_is_trained_on_once(toy_dir, tmp_path):
    whole = run_of(toy_dir(), tmp_path / "whole", staleness=2, ahead=2, save_every=1)
    Loop(whole).run()
    checkpoint = whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / "step_3")
    state = checkpoint.driver_state()
    for entry in state["ahead"]["batches"]:
        del entry["batch"]
    again = run_of(toy_dir(), tmp_path / "again", staleness=2, ahead=2)
    loop = Loop(again)
    loop.resume(replaced(checkpoint, state))
    loop.run()
    assert sorted(consumed(again)) == list(range(4 * 3, 4 * STEPS)) and max(consumed(again).values()) == 1
    assert [row["async/staleness/max"] for row in numbers(again).values()] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_resumes_with_less_staleness(toy_dir, tmp_path, staleness):
    whole = run_of(toy_dir(), tmp_path / "whole", staleness=3, ahead=3, save_every=1)
    Loop(whole).run()
    again = run_of(toy_dir(), tmp_path / "again", staleness=staleness)
    loop = Loop(again)
    loop.resume(whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / "step_2"))
    loop.run()
    assert sorted(consumed(again)) == list(range(4 * 2, 4 * STEPS)) and max(consumed(again).values()) == 1


def replaced(checkpoint, state):
    """The checkpoint with another state of the driver."""

    class Changed(type(checkpoint)):
        def driver_state(self):
            return state

    return Changed(checkpoint.path, checkpoint.manifest)


def surviving(run: Run, run_dir: Path, **policies: str) -> Run:
    """The run, which continues after faults; everything is in this process."""
    chosen = Faults(**{kind: FaultPolicy[policy] for kind, policy in policies.items()})
    trainer = replace(run.trainer, faults=chosen, snapshot_fraction=0.0)
    assert isinstance(run.calls, LocalBackend)
    recovery = FaultRecovery(
        run.calls,
        trainer=trainer,
        learner_pools={"main"},
        pool_of={"actor": "main"},
        reconnect=lambda: None,
        ledger=run_dir / "faults.jsonl",
        respawns=False,
    )
    return replace(run, trainer=trainer, recovery=recovery)


@pytest.mark.parametrize("half", ["collect", "learn"])
@pytest.mark.parametrize("save_every", [0, 1])
def test_only_the_batch_that_causes_faults_is_left_out(toy_dir, tmp_path, half, save_every):
    steps = STEPS + 3
    run = run_of(toy_dir(), tmp_path, staleness=2, ahead=2, save_every=save_every, steps=steps)
    run = surviving(run, tmp_path, numeric="roll_back")
    trained = dict[int, list[int]]()
    original = {name: vars(GRPO)[name] for name in ("collect", "learn")}

    def failing(self, batch):
        uids = batch.row("uid").unique().tolist()
        if 13 in uids:
            raise NumericError("the loss is nan", remedy="lower")
        return original[half](self, batch)

    def learn(self, batch):
        metrics = (failing if half == "learn" else original["learn"])(self, batch)
        trained[self.iteration] = batch.row("uid").unique().tolist()
        return metrics

    kind = type(run.dataflow)
    kind.collect, kind.learn = (failing if half == "collect" else original["collect"]), learn
    assert Loop(run).run().steps == steps
    firsts = [4 * batch for batch in range(steps + 1) if batch != 3]
    assert [trained[step] for step in range(steps)] == [list(range(first, first + 4)) for first in firsts]
    assert (tmp_path / "faults.jsonl").read_text().count("NumericError") == 2
    rows = [row for step, row in run.tracker.rows.items() if step]
    assert rows[-1]["async/groups/consumed"] == 4 * steps
    assert rows[-1]["async/staleness/max"] == 2.0  # ahead again


def test_a_group_that_is_lost_between_the_halves_is_an_error(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path)

    def learn(self, batch):
        self.actor.publish_weights(version=self.iteration + 1)
        return self.observe(batch.take(range(2, len(batch))))

    type(run.dataflow).learn = learn
    with pytest.raises(BatchError, match=r"lost 2 rows \(uids \[0\]\)"):
        Loop(run).run()


@pytest.mark.parametrize("weights", [[1, 1, 1, 97], [0, 0, 5, 5], [19, 1, 0, 0], [0, 0, 0, 0]])
def test_staleness_is_weighted_by_tokens(weights):
    values = torch.tensor([3, 1, 2, 0])
    found = weighted(values, torch.tensor(weights))
    each = sorted(v for v, count in zip(values.tolist(), weights, strict=True) for _ in range(count))
    if not each:
        assert found == {"mean": 0.0, "max": 0.0, "p95": 0.0}
        return
    p95 = each[math.ceil(0.95 * len(each)) - 1]
    assert found == {"mean": pytest.approx(sum(each) / len(each)), "max": each[-1], "p95": p95}
