"""The length of a run in epochs, which its rows turn into steps."""

import logging

import pytest

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.errors import ConfigError
from tests.unit.launch.test_execute import Words

ROWS = 20  # of `Words`, 4 in a step


@pytest.mark.parametrize(
    ("words", "steps", "said"),
    [
        (["trainer.epochs=2"], 10, "20 rows / 4 per step = 5 steps per epoch; 10 steps = 2 epochs"),
        (["trainer.epochs=0.1"], 1, "20 rows / 4 per step = 5 steps per epoch; 1 step = 0.2 epochs"),
        (
            ["trainer.epochs=1.5", "data.batch_size=3", "actor.minibatch_size=3"],
            10,
            "20 rows / 3 per step = 6.67 steps per epoch; 10 steps = 1.5 epochs",
        ),
        (
            ["trainer.epochs=1", "data.max_rows=1", "data.batch_size=1", "actor.minibatch_size=1"],
            1,
            "1 row / 1 per step = 1 step per epoch; 1 step = 1 epoch",
        ),
        (["trainer.epochs=1", "trainer.total_steps=9"], 5, "5 steps = 1 epoch"),
        (
            ["trainer.epochs=3", "trainer.total_steps=9"],
            9,
            "9 steps = 1.8 epochs (trainer.total_steps; trainer.epochs=3 would be 15 steps)",
        ),
        (["trainer.total_steps=7"], 7, "7 steps = 1.4 epochs"),
        (
            ["algorithm=dapo", "trainer.epochs=1"],
            5,
            "5 steps = 1 epoch or more: dynamic sampling may draw up to 10 further batches per step",
        ),
        (["algorithm=dapo", "dataflow_settings.max_refills=0", "trainer.epochs=1"], 5, "5 steps = 1 epoch"),
    ],
)
def test_epochs_are_steps_once_the_rows_are_counted_and_one_line_says_so(toy_dir, tmp_path, caplog, words, steps, said):
    toy = Words(toy_dir, tmp_path)
    toy.common = [word.replace("total_steps: 4, ", "") for word in toy.common]
    with caplog.at_level(logging.INFO):
        prepared = toy.prepared("run", *words, "actor.optimizer.schedule=linear")
    config = prepared.plan.config
    assert config.trainer.total_steps == config.actor.optimizer.schedule_steps == steps
    assert [message for message in caplog.messages if message.endswith(said)]
    is_given = "trainer.total_steps" in " ".join(words) and steps != 5
    origin = "command line" if is_given else "trainer.epochs"
    assert prepared.plan.composed.origins["trainer.total_steps"] == origin


def test_of_a_stream_the_rows_that_are_kept_are_counted_as_far_as_the_first_rows_show(toy_dir, tmp_path, caplog):
    (tmp_path / "few.py").write_text("def few(answer): return int(answer) % 3 == 0\n")
    toy = Words(toy_dir, tmp_path)
    toy.common = [word.replace("total_steps: 4, ", "") for word in toy.common]
    filtered = ["trainer.epochs=1", f"data.filters=[{tmp_path}/few.py:few]", "data.min_kept_fraction=0"]
    whole = toy.prepared("whole", *filtered)
    with caplog.at_level(logging.INFO):
        streamed = toy.prepared("streamed", *filtered, "data.streaming=true")
    kept = len(whole.data.streams["prompts"])
    assert kept < ROWS
    assert streamed.plan.config.trainer.total_steps == whole.plan.config.trainer.total_steps == -(-kept // 4)
    assert f"about {kept} of {ROWS} rows / 4 per step" in caplog.text


def test_a_run_that_only_evaluates_has_no_length(toy_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        prepared = Words(toy_dir, tmp_path).prepared("run", "trainer.epochs=3", "trainer.total_steps=0")
    assert prepared.plan.config.trainer.total_steps == 0
    assert not [message for message in caplog.messages if "per epoch" in message]


def test_more_epochs_resume_a_run_and_a_schedule_that_is_too_short_for_them_is_told(toy_dir, tmp_path, caplog):
    toy = Words(toy_dir, tmp_path)
    toy.common = [word.replace("total_steps: 4, ", "") for word in toy.common]
    toy.run("run", "trainer.epochs=0.4")
    assert CheckpointStore(tmp_path / "run").newest_whole().name == "step_2"
    with caplog.at_level(logging.INFO):
        outcome = toy.run("run", "trainer.epochs=0.8").outcome
    assert outcome.steps == 4
    assert "resuming with trainer.epochs=0.8 (was 0.4)" in caplog.messages
    toy.run("falling", "trainer.epochs=0.4", "actor.optimizer.schedule=linear")
    with pytest.raises(ConfigError, match=r"trainer\.total_steps=4 \(trainer\.epochs=0\.8\) goes beyond") as caught:
        toy.prepared("falling", "trainer.epochs=0.8", "actor.optimizer.schedule=linear")
    assert "actor.optimizer.schedule_steps=4" in caught.value.remedy
