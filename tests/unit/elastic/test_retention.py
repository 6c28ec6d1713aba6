"""Which checkpoints are kept, and which are never deleted."""

import subprocess
import sys

import pytest

from hybridflow.config.loop import Trainer
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.claim import hold, let_go
from hybridflow.elastic.retention import Retention
from hybridflow.errors import ConfigError
from tests.unit.elastic.victim import save, store_with
from tests.unit.launch.plans import planned

ACC, LOSS = "val-core/gsm8k/acc/mean@1", "val-core/gsm8k/loss"
SCORES = {10: 0.3, 20: 0.9, 30: 0.5, 40: 0.7, 50: 0.1}


def evaluations(name: str = ACC) -> dict[int, dict[str, float]]:
    return {step: {name: value, f"{ACC.rpartition('/')[0]}/pass@4": 1.0} for step, value in SCORES.items()}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(2), {40, 50}),
        (Retention(0), {50}),
        (Retention(1, every=20), {20, 40, 50}),
        (Retention(1, best=1), {20, 50}),
        (Retention(1, best=2), {20, 40, 50}),
        (Retention(1, best=9), {10, 20, 30, 40, 50}),
        (Retention(1, best=1, greater_is_better=False), {50}),
        (Retention(1, best=2, greater_is_better=False), {10, 50}),
        (Retention(1, every=30, best=1), {20, 30, 50}),
    ],
)
def test_the_latest_the_best_and_every_nth_are_kept(retention, kept):
    assert retention.kept(evaluations()) == kept


def test_a_loss_is_better_if_it_is_lower():
    assert Retention(1, best=1).kept(evaluations(LOSS)) == {50}
    assert Retention(1, best=1, metric=LOSS, greater_is_better=True).kept(evaluations(LOSS)) == {20, 50}


def test_steps_without_the_metric_and_values_that_are_no_numbers_are_not_among_the_best():
    found = evaluations() | {60: {}, 20: {ACC: float("nan")}}
    assert Retention(1, best=1).kept(found) == {40, 60}


def test_of_equal_checkpoints_the_later_is_kept():
    assert Retention(1, best=1).kept({1: {ACC: 1.0}, 2: {ACC: 1.0}, 3: {ACC: 0.0}}) == {2, 3}


def test_a_metric_must_be_chosen_if_there_are_several():
    Retention(best=1).check({ACC: 1.0, "other": 2.0})
    Retention().check({})
    with pytest.raises(ConfigError, match=rf"keep_best=1 needs one metric.*has 2.*one of: {ACC}, {LOSS}"):
        Retention(best=1).check({ACC: 1.0, LOSS: 2.0})
    with pytest.raises(ConfigError, match=rf"best_metric=val-core/gsm8k/acc/mean is not a metric.*'{ACC}'"):
        Retention(best=1, metric="val-core/gsm8k/acc/mean").check({ACC: 1.0, LOSS: 2.0})


def test_the_room_for_checkpoints_counts_all_that_are_kept():
    settings = Trainer(keep_checkpoints=2, keep_every=30, keep_best=1)
    assert Retention.of(settings).most(total_steps=100, save_every=20) == 2 + 1 + 1


def test_saving_deletes_what_is_not_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=Retention(1, every=30, best=1))
    for step, value in SCORES.items():
        save(store, step, evaluation={ACC: value}, evaluated=[0, step])
    assert [path.name for path in store.paths()] == ["step_20", "step_30", "step_50"]
    save(store, 55, evaluation={ACC: 2.0}, evaluated=[0, 50])  # the evaluation is of another step
    save(store, 56)
    assert [path.name for path in store.paths()] == ["step_20", "step_30", "step_56"]


def test_a_checkpoint_from_which_another_process_resumes_stays_until_it_is_loaded(tmp_path, caplog):
    store = store_with(tmp_path, 1, keep=1)
    program = "import sys; from pathlib import Path; from hybridflow.elastic.claim import hold;"
    program += f"hold(Path({str(store.paths()[0])!r})); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as reader:
        assert reader.stdin and reader.stdout
        reader.stdout.readline()
        with caplog.at_level("INFO", logger="hybridflow"):
            save(store, 2)
        assert [path.name for path in store.paths()] == ["step_1", "step_2"]
        assert "step_1 is being loaded, and will be deleted after a later save" in caplog.text
    save(store, 3)
    assert [path.name for path in store.paths()] == ["step_3"]


def test_a_checkpoint_can_be_let_go_within_one_process(tmp_path):
    store = store_with(tmp_path, 1, keep=1)
    hold(store.paths()[0])
    save(store, 2)
    let_go(tmp_path / "checkpoints" / "step_1")
    let_go(tmp_path / "never held")
    save(store, 3)
    assert [path.name for path in store.paths()] == ["step_3"]


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (
            "{keep_best: 1, save_every: 15, eval_every: 10}",
            r"save_every=15 is not a multiple.*=20, or .*eval_every=5\.",
        ),
        ("{keep_best: 1, save_every: 10, eval_every: 0}", r"this run evaluates nothing.*leave trainer\.keep_best out"),
    ],
)
def test_the_best_checkpoints_need_an_evaluation_each(trainer, words):
    with pytest.raises(ConfigError, match=words):
        planned("algorithm=grpo", "task=calculator", f"trainer={trainer}")
