"""`hybridflow.run` and what it returns, on the local backend, with a toy model that exists in memory only."""

import gc
import logging
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import hybridflow
from hybridflow.dataflows.grpo import GRPO
from hybridflow.errors import CheckpointError, ConfigError, DataError, HybridflowError, RewardError
from tests.toys import toy_model

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
SIZES = {"batch_size": 4, "max_prompt_tokens": 8, "max_response_tokens": 6}
SETTINGS = {
    "data": SIZES,
    "rollout.samples_per_prompt": 2,
    "trainer": {"total_steps": 3, "eval_every": 2, "save_every": 2, "threads": 1, "device": "cpu"},
    "trainer.trackers": ("jsonl",),
    "actor.optimizer.learning_rate": 0.01,
    "reward.processes": 0,
}


def shorter(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]


@pytest.fixture
def desk(tmp_path, monkeypatch, toy_dir):
    """A working directory, a model in memory, and the tokenizer that belongs to it."""
    monkeypatch.chdir(tmp_path)
    return {"model": toy_model("llama"), "tokenizer": AutoTokenizer.from_pretrained(toy_dir())}


def test_rows_models_and_functions_in_memory_are_trained_on(desk):
    weight = desk["model"].get_input_embeddings().weight.detach().clone()
    longest = 6

    def of_this_test(completion_ids, **columns):
        return [-len(ids) / longest for ids in completion_ids]

    result = hybridflow.run(
        "grpo", SETTINGS, data=ROWS, eval_data=ROWS[:3], reward=[of_this_test, "exact_match"], **desk
    )

    assert [row["step"] for row in result.metrics] == [0, 1, 2, 3]
    assert list(result.metrics.to_pandas()["step"]) == result.metrics["step"]
    assert set(result.evaluation) == {
        "val-core/data/reward/mean@1",
        "val-aux/data/of_this_test/mean",
        "val-aux/data/exact_match/mean",
    }
    assert result.first_evaluation == {name: result.metrics[0][name] for name in result.evaluation}
    assert {row["split"] for row in result.samples} == {"eval"}
    assert result.run_dir == Path("runs/run").absolute()
    assert result.checkpoint == result.run_dir / "checkpoints" / "step_3"
    assert "step_3" in repr(result)
    assert "<iframe" in result.report._repr_html_()

    model, tokenizer = result.model(), result.tokenizer()
    assert isinstance(model, PreTrainedModel)
    assert not torch.equal(model.get_input_embeddings().weight, weight)
    assert torch.equal(desk["model"].get_input_embeddings().weight, weight), "the caller's model was trained in place"
    prompt = tokenizer("1+1=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


def test_the_same_objects_resume_and_other_objects_are_refused(desk):
    def run(rows: list, reward: object, **trainer: object) -> hybridflow.Result:
        return hybridflow.run("grpo", {**SETTINGS, **trainer}, data=rows, reward=reward, **desk)

    first = run(ROWS, lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids])
    again = run(
        list(map(dict, ROWS)),
        lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids],
        **{"trainer.total_steps": 4},
    )
    assert again.run_dir == first.run_dir
    assert [row["step"] for row in again.metrics] == [1, 2, 3, 4]

    changed = (
        rf"reward\.functions: 'function' \({__file__}, line \d+\) has changed since the checkpoint was written: its"
    )
    with pytest.raises(CheckpointError, match=changed) as refused:
        run(ROWS, lambda completion_ids, **columns: [-1.0 for ids in completion_ids], **{"trainer.total_steps": 4})
    assert "trainer.resume_changed=accept" in refused.value.remedy and "trainer.resume=never" in refused.value.remedy
    (earlier,) = re.findall(r"its earlier source is in (.*?)\)", refused.value.remedy)
    assert "float(len(ids))" in Path(earlier).read_text()
    with pytest.raises(CheckpointError, match=r"data\.train_files was"):
        run(ROWS[:10], shorter, **{"trainer.total_steps": 4})

    anew = run(ROWS[:10], shorter, **{"trainer.resume": "never"})
    assert [row["step"] for row in anew.metrics][-1] == 3
    assert (Path("runs/run.1") / "inputs").is_dir(), "the earlier run has lost its inputs"
    assert len(list((anew.run_dir / "inputs").rglob("data.jsonl"))) == 1, "inputs of the earlier runs are kept"


def test_a_complete_run_starts_nothing_and_gives_its_result_again(desk):
    def run() -> hybridflow.Result:
        return hybridflow.run("grpo", SETTINGS, data=ROWS, eval_data=ROWS[:3], reward=shorter, **desk)

    first = run()
    log = first.run_dir / "run.log"
    earlier = log.read_text()
    assert "all roles" in earlier
    evaluation, samples = dict(first.evaluation), len(first.samples)
    again = run()
    assert (dict(again.evaluation), len(again.samples)) == (evaluation, samples)
    words = log.read_text()[len(earlier) :]
    assert "the run is complete: checkpoint=" in words and "all roles" not in words, words


def test_a_model_with_other_random_weights_does_not_resume_and_the_error_says_why(desk):
    hybridflow.run("grpo", {**SETTINGS, "trainer.total_steps": 1}, data=ROWS, reward=shorter, **desk)
    stored = sorted(Path("runs/run/inputs").iterdir())
    with torch.no_grad():
        desk["model"].get_input_embeddings().weight.mul_(2)
    with pytest.raises(CheckpointError, match=r"model\.path was 'runs/run/inputs/.*' and is") as refused:
        hybridflow.run("grpo", SETTINGS, data=ROWS, reward=shorter, **desk)
    assert "torch.manual_seed" in refused.value.remedy
    assert sorted(Path("runs/run/inputs").iterdir()) == stored, "the refused model is kept"
    with pytest.raises(hybridflow.HybridflowError):
        hybridflow.run("grpo", {**SETTINGS, "trainer.experiment": "b", "trainer.sed": 1}, data=ROWS, **desk)
    assert not Path("runs/b").exists()


def test_a_callback_sees_each_step_and_ends_the_run(desk):
    seen = {}

    def stop_at_2(step, metrics):
        seen[step] = metrics
        return hybridflow.STOP if step == 2 else None

    settings = {**SETTINGS, "trainer.total_steps": 9, "trainer.eval_every": 5}
    result = hybridflow.run(
        "grpo", settings, data=ROWS, eval_data=ROWS[:3], reward=shorter, callbacks=[stop_at_2], **desk
    )

    assert list(seen) == [1, 2]
    assert seen[2]["training/global_step"] == 2
    assert result.checkpoint is not None and result.checkpoint.name == "step_2"
    assert "val-core/data/reward/mean@1" in result.metrics[-1], "the last step was not evaluated"
    assert result.ending is not None and result.ending.how == "done"
    more = hybridflow.run(
        "grpo", {**settings, "trainer.total_steps": 3}, data=ROWS, eval_data=ROWS[:3], reward=shorter, **desk
    )
    assert more.metrics[-1]["step"] == 3, "the same call did not continue"


class Own(GRPO):
    """A dataflow of the test."""

    def step(self, prompts):
        return super().step(prompts) | {"own/one": 1.0}


def test_a_dataflow_class_and_roles_are_given_as_objects(desk):
    class Local(Own):
        def step(self, prompts):
            return super().step(prompts) | {"own/two": 2.0}

    for dataflow, name in ((Own, "own/one"), (Local, "own/two")):
        settings = {**SETTINGS, "trainer.experiment": name.replace("/", "-")}
        result = hybridflow.run(dataflow, settings, data=ROWS, reward=shorter, **desk)
        assert result.metrics[name][-1] == float(name == "own/two") + 1.0


def test_a_run_that_fails_raises_and_leaves_a_result(desk):
    calls = []

    def fails(completions, **columns):
        raise ValueError("no reward today")

    with pytest.raises(RewardError, match="no reward today") as failed:
        hybridflow.run("grpo", {**SETTINGS, "trainer.eval_every": 0}, data=ROWS, reward=fails, **desk)
    assert "hybridflow.Result(" in "".join(failed.value.__notes__)
    result = hybridflow.Result("runs/run")
    assert result.ending is not None and result.ending.how == "failed"
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        result.model()

    def boom(step, metrics):
        calls.append(step)
        raise ZeroDivisionError("in a callback")

    with pytest.raises(ZeroDivisionError, match="in a callback"):
        hybridflow.run(
            "grpo", {**SETTINGS, "trainer.run_dir": "b"}, data=ROWS, reward=shorter, callbacks=[boom], **desk
        )
    assert calls == [1] and hybridflow.Result("b").metrics["step"] == [1], "the row of a whole step is lost"


def test_all_problems_of_a_run_are_raised_together(desk, capfd):
    with pytest.raises(DataError) as refused:
        settings = {**SETTINGS, "trainer.totl_steps": 3, "data.batch_size": "many"}
        hybridflow.run("grpo", settings, data=[{"prompt": object()}], reward=shorter, **desk)
    problems = [refused.value, *refused.value.further]
    assert len(problems) == 3
    assert all(any(key in str(each) for each in problems) for key in ("totl_steps", "batch_size", "data=: row 1"))
    assert len(refused.value.__notes__) == 2
    assert not Path("runs/run/config.yaml").exists()

    with pytest.raises(HybridflowError) as refused:  # only known from the data and the functions
        hybridflow.run("grpo", SETTINGS, data=[{"prompt": "1+1=" * 20}], reward=["exact_match", lambda x: 0.0], **desk)
    assert len({refused.value, *refused.value.further}) >= 2
    assert capfd.readouterr().err.count("INFO    device=cpu") == 1, "the plan was checked twice"


def test_ctrl_c_saves_the_step_and_raises(desk):
    def interrupt(step, metrics):
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    settings = {**SETTINGS, "trainer.total_steps": 9, "trainer.save_every": 9}
    with pytest.raises(KeyboardInterrupt):
        hybridflow.run("grpo", settings, data=ROWS, reward=shorter, callbacks=[interrupt], **desk)
    result = hybridflow.Result("runs/run")
    assert result.ending is not None and result.ending.how == "interrupted"
    assert result.checkpoint is not None and result.checkpoint.name == "step_2"
    assert signal.getsignal(signal.SIGINT) is before


def test_logging_is_as_before_and_a_thread_may_run(desk):
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.getLogger("hybridflow").level)
    settings, processes, found = SETTINGS | {"reward.processes": 1}, psutil.Process().children(), []
    thread = threading.Thread(
        target=lambda: found.append(hybridflow.run("grpo", settings, data=ROWS, reward=shorter, **desk))
    )
    gc.disable()
    thread.start()
    thread.join()
    assert psutil.Process().children() == processes, "processes of rewards have outlived the run"
    gc.enable()
    assert found and found[0].metrics[-1]["step"] == 3
    assert (list(root.handlers), root.level, logging.getLogger("hybridflow").level) == before


@pytest.mark.parametrize(
    ("algorithm", "rows", "metric"),
    [
        ("sft", [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS], "train/loss"),
        ("ipo", [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in ROWS], "train/loss"),
        ("reward-model", [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "0"} for r in ROWS], "train/loss"),
    ],
)
def test_every_trainer_runs(desk, algorithm, rows, metric):
    settings = {key: value for key, value in SETTINGS.items() if key != "rollout.samples_per_prompt"}
    result = hybridflow.run(algorithm, {**settings, "trainer.eval_every": 0}, data=rows, **desk)
    assert len([value for value in result.metrics[metric] if value is not None]) == 3
    if algorithm == "reward-model":
        assert type(result.model()).__name__.endswith("Classification")


def test_an_unknown_algorithm_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="no trainer or algorithm 'grp0'") as unknown:
        hybridflow.run("grp0")
    assert "grpo" in unknown.value.remedy


@pytest.mark.parametrize(
    ("arguments", "words", "remedy"),
    [
        ((["trainer.total_steps=1"],), "algorithm= is of type list", "Settings are the second argument"),
        (("grpo", ["trainer.total_steps=1"]), "settings= is of type list", "mapping"),
        (("grpo", {3: 4}), "settings= has keys that are not text", "mapping"),
    ],
)
def test_the_words_of_a_command_line_are_refused_as_settings(arguments, words, remedy):
    with pytest.raises(ConfigError, match=words) as refused:
        hybridflow.run(*arguments)
    assert remedy in refused.value.remedy
    assert words in hybridflow.plan(*arguments).text


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("train_dataset", "from Python data="),
        ("reward_funcs", "from Python reward="),
        ("processing_class", "from Python tokenizer="),
        ("args", "the second argument"),
        ("num_generations", "rollout.samples_per_prompt"),
        ("rewards", "Did you mean 'reward'"),
        ("environment", "environment is a setting: give it in the second argument, a mapping, as {'environment': ...}"),
        ("task", "as {'task': ...}"),
    ],
)
def test_the_arguments_of_other_systems_lead_to_those_here(name, instead):
    with pytest.raises(ConfigError, match=f"There is no argument {name}=.*{instead}"):
        hybridflow.run("grpo", **{name: None})


def test_a_run_file_and_the_record_of_a_run_are_experiments(desk):
    Path("base.yaml").write_text("command: grpo\ntrainer: {total_steps: 2, experiment: filed}\n")
    experiment = hybridflow.Experiment.load("base.yaml").with_settings(SETTINGS | {"trainer.total_steps": 1})
    with_objects = replace(experiment, objects={"data": ROWS, "reward": shorter, **desk})
    result = with_objects.run()
    assert result.run_dir.name == "filed" and result.metrics[-1]["step"] == 1
    record = (result.run_dir / "config.yaml").read_text()
    for line in (
        "experiment: filed  # origin: run file",
        "total_steps: 1  # origin: Python",
        "threads: 1  # origin: Python",
    ):
        assert f"\n  {line}\n" in record
    again = hybridflow.Experiment.load(result.run_dir / "config.yaml").with_settings({"trainer.total_steps": 2})
    assert again.run().metrics[-1]["step"] == 2
    record = (result.run_dir / "config.yaml").read_text()
    for line in ("total_steps: 2  # origin: Python", "threads: 1  # origin: run file"):
        assert f"\n  {line}\n" in record
    with pytest.raises(ConfigError, match="There is no file 'bases.yaml'"):
        hybridflow.Experiment.load("bases.yaml")
    with pytest.raises(ConfigError, match="dtype='float16' is unknown") as unknown:
        hybridflow.export(result, "model", dtype="float16")
    assert "float32, bfloat16" in unknown.value.remedy


def test_further_settings_replace_only_those_of_the_same_names():
    first = hybridflow.Experiment("grpo", {"trainer": {"total_steps": 2, "experiment": "a"}, "trainer.seed": 1})
    second = first.with_settings({"trainer": {"seed": 3}, "trainer.experiment": "b"})
    assert second.settings == {"trainer.total_steps": 2, "trainer.seed": 3, "trainer.experiment": "b"}
    assert first.settings["trainer"] == {"total_steps": 2, "experiment": "a"}


def test_a_changed_dataflow_class_is_refused_and_may_be_accepted(desk):
    def run(value: float, **trainer: object) -> hybridflow.Result:
        class Local(GRPO):
            def step(self, prompts):
                return super().step(prompts) | {"own/value": value}

        return hybridflow.run(Local, {**SETTINGS, **trainer}, data=ROWS, reward=shorter, **desk)

    run(1.0)
    with pytest.raises(CheckpointError, match=r"dataflow: 'Local' \(.*\) has changed since the checkpoint was written"):
        run(2.0, **{"trainer.total_steps": 4})
    accepted = run(2.0, **{"trainer.total_steps": 4, "trainer.resume_changed": "accept"})
    assert accepted.metrics["own/value"] == [1.0, 1.0, 1.0, 2.0]
