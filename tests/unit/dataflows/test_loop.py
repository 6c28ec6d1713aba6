"""The loop: what it does when, and going on where it was."""

import resource
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.loop import Trainer
from hybridflow.data.loader import BatchStream
from hybridflow.data.order import Epochs
from hybridflow.dataflows.evaluation import Evaluate, evaluate_held_out, evaluate_responses
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import Dataflow, NoSettings
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.run import Run
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.devices import NewPlan
from hybridflow.elastic.retention import Retention
from hybridflow.elastic.stopping import Abandoned
from hybridflow.errors import ConfigError, NumericError, ResourceError, WorkerError
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.observability.metrics import last
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.trace import CallTrace
from tests.unit.dataflows.programs import Counting, Notebook, Roles, calculator_prompts, local_roles


def decoder(directory):
    tokenizer = load_tokenizer(directory)
    return lambda ids: decode_responses(tokenizer, ids)


def evaluation_of(roles: Roles, directory) -> Evaluate:
    prompts = calculator_prompts(directory, 2).with_columns(rows={"uid": torch.arange(2)})
    groups, numbers = roles.groups, {"samples_per_prompt": 1, "sample_rows": 2, "what": "acc"}
    return partial(
        evaluate_responses, groups["rollout"], groups["reward"], [prompts], decode=decoder(directory), **numbers
    )


def run_of(directory, run_dir: Path, trainer: Trainer, kind: type[Dataflow] = Counting, *, evaluated=True) -> Run:
    roles = local_roles(directory)
    settings = kind.Settings() if issubclass(kind, GRPO) else NoSettings()
    return Run(
        trainer=trainer,
        dataflow=kind(roles.groups | {"reference": None}, settings=settings, samples_per_prompt=2),
        streams={"prompts": BatchStream(calculator_prompts(directory, 10), 4, Epochs(10, 0, shuffle=True))},
        evaluations=[evaluation_of(roles, directory)] if evaluated else [],
        tracker=Notebook(),
        timers=StageTimers(),
        checkpoints=CheckpointStore(run_dir, keep=Retention(9)),
        learners={"actor": roles.groups["actor"]},
        policies=[roles.groups["actor"]],
        decode=decoder(directory),
        trace=CallTrace(roles.backend.drain_calls, {"main": 1}),
        num_devices=1,
        config={"trainer.seed": 0},
        calls=roles.backend,
    )


def saved(run: Run) -> list[str]:
    return [path.name for path in run.checkpoints.paths()]


def evaluated(run: Run) -> list[int]:
    return [step for step, row in run.tracker.rows.items() if any(name.startswith("val-core/") for name in row)]


@pytest.fixture
def finished(toy_dir, tmp_path) -> Run:
    """Five steps, looked at and saved every two."""
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=5, eval_every=2, save_every=2, samples_every=2))
    Loop(run).run()
    return run


class OnDemand:
    """Prompts that are read when a batch needs them, and the threads that have read some."""

    def __init__(self, directory: Path) -> None:
        self._rows, self.readers = calculator_prompts(directory, 10), []
        self.columns = self._rows.columns

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, rows: torch.Tensor) -> Batch:
        self.readers.append(threading.current_thread().name)
        return self._rows.select(rows)


def test_each_step_prepares_the_batch_of_the_next_and_a_checkpoint_does_not_count_it(toy_dir, tmp_path):
    rows = OnDemand(toy_dir())
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=4, eval_every=0, save_every=1), evaluated=False)
    run = replace(run, streams={"prompts": BatchStream(rows, 4, Epochs(10, 0, shuffle=True))})
    Loop(run).run()
    assert rows.readers == ["read data"] * 4
    states = [run.checkpoints.open(path).driver_state() for path in run.checkpoints.paths()]
    assert [state["streams"]["prompts"]["position"] for state in states] == [4, 8, 12, 16]


def test_every_step_has_one_row(finished):
    assert list(finished.tracker.rows) == [0, 1, 2, 3, 4, 5]
    rows = [finished.tracker.rows[step] for step in range(1, 6)]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["training/epoch"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]


def test_evaluation_is_before_the_first_step_every_so_often_and_after_the_last(finished):
    assert evaluated(finished) == [0, 2, 4, 5]
    assert sorted(finished.tracker.samples) == [0, 2, 4, 5]
    assert all(sample.split == "eval" for rows in finished.tracker.samples.values() for sample in rows)


def test_checkpoints_are_every_so_often_and_after_the_last_step(finished):
    assert saved(finished) == ["step_2", "step_4", "step_5"]


def test_seconds_are_reported_by_stage(finished):
    rows = finished.tracker.rows
    assert {"timing_s/step", "perf/total_num_tokens", "perf/time_per_step", "perf/throughput"} <= rows[1].keys()
    for row in list(rows.values())[1:]:  # steps of this dataflow call no role
        assert (row["perf/critical_path_seconds"], row["perf/idle_fraction/main"]) == (0.0, 1.0)
    assert "timing_s/testing" in rows[2]
    assert "timing_s/testing" not in rows[3]
    assert "timing_s/save_checkpoint" in rows[3]


def test_nothing_is_evaluated_or_saved_when_turned_off(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=2, eval_every=0, save_every=0))
    outcome = Loop(run).run()
    assert evaluated(run) == []
    assert (outcome.steps, outcome.evaluation, outcome.checkpoint) == (2, {}, None)
    assert list(run.tracker.rows) == [1, 2]
    assert saved(run) == []


def test_the_outcome_is_the_last_evaluation_and_the_last_checkpoint(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=3, eval_every=2, save_every=2))
    loop = Loop(run)
    outcome = loop.run()
    last = {name: value for name, value in run.tracker.rows[3].items() if name.startswith("val-core/")}
    assert (outcome.steps, outcome.evaluation) == (3, last)
    assert loop.first_evaluation == run.tracker.rows[0]
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step_3"


def test_a_resumed_loop_goes_on_as_if_it_had_never_stopped(finished, toy_dir, tmp_path):
    again = run_of(toy_dir(), tmp_path / "again", finished.trainer)
    loop = Loop(again)
    loop.resume(finished.checkpoints.open(tmp_path / "checkpoints" / "step_2"))
    outcome = loop.run()
    assert list(again.tracker.rows) == [3, 4, 5]
    for step, row in again.tracker.rows.items():
        expected = finished.tracker.rows[step]
        assert {name: row[name] for name in ("total", "training/epoch")} == {
            name: expected[name] for name in ("total", "training/epoch")
        }
    assert evaluated(again) == [4, 5]
    assert outcome.evaluated == (0, 5)
    assert loop.first_evaluation == finished.tracker.rows[0]
    assert outcome.steps == 5


def test_a_run_that_is_complete_is_only_reported(finished, toy_dir, tmp_path):
    again = run_of(toy_dir(), tmp_path / "again", finished.trainer)
    loop = Loop(again)
    loop.resume(finished.checkpoints.open(tmp_path / "checkpoints" / "step_5"))
    outcome = loop.run()
    assert again.tracker.rows == {}
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step_5"
    assert outcome.evaluation and outcome.evaluated == (0, 5)


def test_seconds_of_roles_samples_and_tokens_are_those_of_the_step(toy_dir, tmp_path):
    trainer = Trainer(total_steps=2, eval_every=2, save_every=0, samples_every=1, sample_rows=3)
    run = run_of(toy_dir(), tmp_path, trainer, GRPO)
    Loop(run).run()
    row = run.tracker.rows[1]
    stages = ["gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step"]
    assert {f"timing_s/{stage}" for stage in stages} <= row.keys()
    assert "timing_s/testing" not in row
    assert [sample.split for sample in run.tracker.samples[1]] == ["train"] * 3
    batch = run.dataflow.last_batch
    assert run.tracker.rows[2]["perf/total_num_tokens"] == float(batch.lengths.sum())


class Failing(GRPO):
    """Fails in its third step, before or after it has observed the batch."""

    def observe(self, batch):
        if self.iteration == 2 and self.when == "before":
            raise ValueError("mine")
        return super().observe(batch)

    def step(self, prompts):
        metrics = super().step(prompts)
        if self.iteration == 2:
            if self.when == "stopped":
                raise Abandoned
            raise ValueError("mine")
        return metrics


@pytest.mark.parametrize(("when", "steps"), [("before", [1, 2]), ("after", [1, 3]), ("stopped", [1, 3])])
def test_a_run_without_evaluations_has_samples_of_its_first_and_last_batch_however_it_ends(
    toy_dir, tmp_path, when, steps
):
    trainer = Trainer(total_steps=4, eval_every=0, save_every=0, sample_rows=3)
    run = run_of(toy_dir(), tmp_path, trainer, Failing, evaluated=False)
    run.dataflow.when = when
    if when == "stopped":
        Loop(run).run()
    else:
        with pytest.raises(ValueError, match="mine"):
            Loop(run).run()
    assert {step: len(samples) for step, samples in run.tracker.samples.items()} == dict.fromkeys(steps, 3)


def test_a_run_that_ends_as_planned_has_samples_of_its_last_step_once(toy_dir, tmp_path):
    trainer = Trainer(total_steps=3, eval_every=0, save_every=0, samples_every=3)
    run = run_of(toy_dir(), tmp_path, trainer, GRPO, evaluated=False)
    Loop(run).run()
    assert {step: len(samples) for step, samples in run.tracker.samples.items()} == {1: 6, 3: 6}


class Numbers(Counting):
    """Returns plain numbers as metrics."""

    def step(self, prompts):
        return super().step(prompts) | {"mine/best": 0.5}

    def evaluate(self, held_out):
        return {"mine/held_out": len(held_out), "mine/odd": self.odd}


class Tied(Counting):
    """Gets the same score for all samples of a prompt."""

    def step(self, prompts):
        return super().step(prompts) | {"frac_reward_zero_std": 1.0}


def test_a_run_that_learns_nothing_says_so_once_and_reports_after_every_step(toy_dir, tmp_path, caplog):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=5, save_every=0), Tied, evaluated=False)
    seen = []
    run = replace(run, report=lambda: seen.append((len(run.tracker.rows), caplog.text.count("being learned"))))
    assert "(steps 1 to 5)" in Loop(run).run().warnings[0].message
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert "Nothing is being learned (steps 1 to 3): all samples of each prompt have the same score" in caplog.text
    assert "What to do: Read the samples" in caplog.text


def test_plain_numbers_are_metrics_of_a_step_and_of_an_evaluation(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=1, save_every=0), Numbers, evaluated=False)
    held_out = partial(evaluate_held_out, run.dataflow, calculator_prompts(toy_dir(), 2))
    run = replace(run, evaluations=[held_out])
    run.dataflow.odd = 1.5
    Loop(run).run()
    row = run.tracker.rows[1]
    assert (row["mine/best"], row["mine/held_out"], row["mine/odd"]) == (0.5, 2.0, 1.5)
    run.dataflow.odd = "many"
    with pytest.raises(ConfigError, match=r"Numbers\.evaluate returned the metric 'mine/odd' as str.*Return a number"):
        held_out()


class Poisoning(Counting):
    """Makes a weight of the actor NaN in its third step."""

    def step(self, prompts):
        if self.iteration == 2:
            with torch.no_grad():
                next(self.engine.weight_shards()).tensor[0] = torch.nan
        return super().step(prompts)


def test_weights_that_are_not_finite_end_the_run_and_older_checkpoints_stay(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=5, eval_every=0, save_every=1), Poisoning, evaluated=False)
    run.dataflow.engine = run.dataflow.actor.handles[0].host.workers["actor"].engine
    with pytest.raises(WorkerError, match=r"actor\.save failed: NumericError: The weight .* became NaN") as caught:
        Loop(run).run()
    assert "optimizer.learning_rate" in caught.value.remedy
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_1", "step_2"]
    assert run.checkpoints.latest().step == 2


class Idle(Counting):
    """All samples of each prompt have the same score, from its second step."""

    def step(self, prompts):
        return super().step(prompts) | {"frac_reward_zero_std": last(float(self.iteration >= 1))}


def test_a_run_from_which_nothing_is_learned_is_saved_and_ends_if_that_is_wanted(toy_dir, tmp_path):
    trainer = Trainer(total_steps=9, eval_every=0, save_every=9, no_learning_steps=4)
    run = run_of(toy_dir(), tmp_path, trainer, Idle, evaluated=False)
    with pytest.raises(NumericError, match=r"steps 2 to 5.*trainer.no_learning_steps=4") as caught:
        Loop(run).run()
    assert "easier prompts" in caught.value.remedy
    assert saved(run) == ["step_5"]


class Leaving(Counting):
    """Is asked to stop in its third step, before or after the actor has learnt in it, and leaves the step."""

    def step(self, prompts):
        metrics = super().step(prompts)
        if self.iteration == 2:
            if self.learns:
                answers = prompts.tokens("prompt_ids")
                mask = answers.like(torch.ones(len(answers.values)))
                self.actor.supervised_step(
                    prompts.with_columns(tokens={"response_ids": answers, "response_mask": mask})
                ).result()
            self.stop.signal = signal.SIGTERM
            raise Abandoned
        return metrics


@pytest.mark.parametrize("learns", [False, True])
def test_an_abandoned_step_is_never_saved_half_done(toy_dir, tmp_path, learns):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=5, eval_every=0, save_every=9), Leaving, evaluated=False)
    run.dataflow.learns, run.dataflow.stop = learns, run.stop
    outcome = Loop(run).run()
    assert outcome.steps == 2 and outcome.stopped.abandoned == "step 3"
    assert outcome.stopped.saved_step == (0 if learns else 2)
    assert saved(run) == ([] if learns else ["step_2"])
    if not learns:  # the prompts of the third step are still to come
        state = run.checkpoints.latest().driver_state()
        assert state["dataflow"]["total"] == run.tracker.rows[2]["total"] != run.dataflow.total


def test_a_run_that_is_asked_to_stop_while_it_saves_in_order_to_grow_ends_if_it_goes_on(toy_dir, tmp_path):
    trainer = Trainer(total_steps=5, eval_every=0, samples_every=0, save_every=9)
    run = run_of(toy_dir(), tmp_path, trainer, evaluated=False)

    def grows() -> bool:
        run.stop.signal = signal.SIGTERM
        return True

    loop = Loop(replace(run, grows=grows))
    with pytest.raises(NewPlan):
        loop.run()
    outcome = loop.run()
    assert outcome.stopped is not None
    assert (outcome.steps, outcome.stopped.by, outcome.stopped.saved_step) == (1, "SIGTERM", 1)
    assert saved(run) == ["step_1"] and list(run.tracker.rows) == [1]


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_reason(toy_dir, tmp_path, in_background):
    trainer = Trainer(total_steps=5, eval_every=0, save_every=2, samples_every=0, async_save=in_background)
    run, before = run_of(toy_dir(), tmp_path, trainer, evaluated=False), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        with pytest.raises(
            ResourceError, match=r"The file is too large for .*step_2 could not be written.*raise the limit"
        ):
            Loop(run).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert max(run.tracker.rows) in ((2, 3, 4) if in_background else (2,))
    assert not any(run.checkpoints.directory.iterdir())


@pytest.mark.parametrize("in_background", [True, False])
def test_the_last_checkpoint_is_complete_when_a_step_fails(toy_dir, tmp_path, in_background):
    trainer = Trainer(total_steps=5, eval_every=0, save_every=2, samples_every=0, async_save=in_background)

    class Failing(Counting):
        def step(self, prompts):
            if self.iteration == 2:
                raise ValueError("of the user")
            return super().step(prompts)

    run = run_of(toy_dir(), tmp_path, trainer, Failing, evaluated=False)
    with pytest.raises(ValueError, match="of the user"):
        Loop(run).run()
    assert saved(run) == ["step_2"] and run.checkpoints.latest() is not None


def test_rows_say_how_long_a_checkpoint_took(toy_dir, tmp_path):
    run = run_of(toy_dir(), tmp_path, Trainer(total_steps=5, eval_every=0, save_every=2, samples_every=0))
    Loop(run).run()
    rows = [row for row in run.tracker.rows.values() if "perf/checkpoint_write_seconds" in row]
    assert rows and all(row["perf/checkpoint_write_seconds"] > 0 for row in rows)
    assert saved(run) == ["step_2", "step_4", "step_5"]
