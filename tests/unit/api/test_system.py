"""`assemble`, `plan` and `show`: the parts of a run in the caller's hands."""

import json
import signal
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoTokenizer

import hybridflow
from hybridflow.controller.futures import wait
from hybridflow.dataflows.grpo import GRPO
from hybridflow.errors import ConfigError, DataError, ResourceError
from tests.toys import toy_model
from tests.unit.api.test_run import ROWS, SETTINGS, SIZES, shorter

QUIET = {**SETTINGS, "trainer.eval_every": 0}


@pytest.fixture
def arguments(tmp_path, monkeypatch, toy_dir):
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(toy_dir())
    return {"model": toy_model("llama"), "tokenizer": tokenizer, "data": ROWS, "reward": shorter}


def numbers(run_dir: str) -> list[dict]:
    """The rows of a run without what differs each time."""
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/", "own/"))} for row in rows]


def test_a_loop_of_ones_own_takes_the_steps_that_run_takes_and_resumes(arguments):
    hybridflow.run("grpo", {**QUIET, "trainer.run_dir": "whole"}, **arguments)

    with hybridflow.assemble("grpo", {**QUIET, "trainer.run_dir": "own"}, **arguments) as system:
        for batch in system.prompts:
            system.log(system.dataflow.step(batch))
            system.log({"own/step": float(system.step)})
            with pytest.raises(ConfigError, match="needs held-out data, but trainer.eval_every=0"):
                system.evaluate()
            if system.step == 2:
                assert system.save() == Path("own/checkpoints/step_2").absolute()
                break
    assert hybridflow.Result("own").metrics["own/step"] == [1.0, 2.0]
    with hybridflow.assemble("grpo", {**QUIET, "trainer.run_dir": "own"}, **arguments) as system:
        assert system.step == 2
        for batch in system.prompts:
            system.log(system.dataflow.step(batch))
    assert numbers("own") == numbers("whole")


def test_roles_are_at_hand_and_evaluations_join_the_row(arguments):
    with hybridflow.assemble("grpo", {**QUIET, "trainer.eval_every": 9}, eval_data=ROWS[:3], **arguments) as system:
        assert list(system.roles) == ["actor", "rollout", "reward"]
        actor, rollout, reward = (system.roles[name] for name in ("actor", "rollout", "reward"))
        for prompts in system.prompts:
            batch = reward.score(rollout.generate(prompts.repeat(2)))
            batch = batch.join(actor.logprobs(batch))
            batch = actor.advantages(batch)
            system.log(wait(actor.update(batch)))
            wait(actor.publish_weights(version=system.step))
            evaluation = system.evaluate()
            with pytest.raises(KeyError, match=r"no 'acc/mean'"):
                evaluation["acc/mean"]
    (metrics,) = {tuple(evaluation)}
    last = hybridflow.Result("runs/run").metrics[-1]
    assert metrics and last["step"] == 3 and last[metrics[0]] == evaluation[metrics[0]]
    assert "actor/grad_norm" in last


def test_callbacks_see_the_rows_of_the_loop_and_end_it(arguments):
    seen = {}

    def stop_at_2(step, metrics):
        seen[step] = metrics["own/step"]
        return hybridflow.STOP if step == 2 else None

    arguments["callbacks"] = [stop_at_2]
    assert hybridflow.plan("grpo", QUIET, **arguments).problems == ()
    with hybridflow.assemble("grpo", QUIET, **arguments) as system:
        for batch in system.prompts:
            system.log(system.dataflow.step(batch))
            system.log({"own/step": float(system.step)})
    assert seen == {1: 1.0, 2: 2.0}
    assert hybridflow.Result("runs/run").metrics["own/step"] == [1.0, 2.0]


def test_a_system_that_is_not_entered_says_how(arguments):
    unopened = hybridflow.assemble("grpo", QUIET, **arguments)
    with pytest.raises(ConfigError, match=r"assemble\(\.\.\.\)\.prompts: the run has not been started") as refused:
        unopened.prompts  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert refused.value.remedy == "Write: with hybridflow.assemble(...) as system: system.prompts ..."
    with pytest.raises(AttributeError, match="no attribute 'promts'"):
        unopened.promts  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert not Path("runs").exists()


def test_a_system_that_is_refused_leaves_no_copies_of_its_objects(arguments):
    settings = {**QUIET, "data.max_prompt_tokens": 1}
    with pytest.raises(DataError, match="data.max_prompt_tokens"), hybridflow.assemble("grpo", settings, **arguments):
        pass
    assert not list(Path("runs").iterdir())


def test_steps_of_the_loop_that_no_checkpoint_keeps_are_said_at_its_end(arguments, capfd):
    def said(saved_step: int, **settings: object) -> str:
        with hybridflow.assemble("grpo", {**QUIET, **settings}, **arguments) as system:
            for batch in system.prompts:
                system.log(system.dataflow.step(batch))
                if system.step == saved_step:
                    system.save()
        return capfd.readouterr().err

    nothing = "No checkpoint was saved: the trained weights are not kept. Call system.save() in the loop to keep them."
    assert nothing in said(0, **{"trainer.run_dir": "none"})
    assert "The steps after the checkpoint of step 2 are not kept." in said(2, **{"trainer.run_dir": "two"})
    for saved_step, save_every in ((3, 1), (0, 0)):
        quiet = said(saved_step, **{"trainer.run_dir": f"run{save_every}", "trainer.save_every": save_every})
        assert "not kept. Call" not in quiet


def test_an_error_in_the_loop_ends_the_run_and_is_recorded(arguments):
    with pytest.raises(ZeroDivisionError), hybridflow.assemble("grpo", QUIET, **arguments) as system:
        for batch in system.prompts:
            with pytest.raises(ConfigError, match="a metric with the name 'step'"):
                system.log({"step": 7})
            row = system.log(system.dataflow.step(batch))
            assert type(row["critic/score/mean"]) is float and row["training/global_step"] == 1.0
            assert system.log({"own/tensor": torch.tensor(2.0)})["own/tensor"] == 2.0
            raise ZeroDivisionError("mine")
    assert hybridflow.Result("runs/run").metrics["own/tensor"] == [2.0], "the row of a whole step is lost"
    ending = hybridflow.Result("runs/run").ending
    assert ending is not None and ending.how == "failed" and "mine" in ending.said


def test_ctrl_c_saves_the_last_step_of_the_loop(arguments):
    settings = {**QUIET, "trainer.total_steps": 9}
    with pytest.raises(KeyboardInterrupt), hybridflow.assemble("grpo", settings, **arguments) as system:
        for batch in system.prompts:
            system.log(system.dataflow.step(batch))
            if system.step == 2:
                signal.raise_signal(signal.SIGINT)
    result = hybridflow.Result("runs/run")
    assert result.checkpoint is not None and result.checkpoint.name == "step_2"


def test_a_plan_has_the_roles_and_all_problems_and_leaves_nothing(arguments):
    plan = hybridflow.plan("grpo", QUIET, **arguments)
    assert plan.problems == () and "The run begins at step 1." in plan.text
    assert plan.roles["role"] == ["actor", "rollout", "reward"]
    assert "\ninputs/" in plan.text and "/data.jsonl rows=" in plan.text, "the plan names its temporary folder"
    wrong = hybridflow.plan("grpo", {**QUIET, "trainer.totl_steps": 3}, **{**arguments, "reward": ["exact_matc", 3]})
    assert [type(problem) for problem in wrong.problems] == [ConfigError] * 2
    assert not list(Path().iterdir()), "a plan has written something"


class OfTRL:
    """As TRL's TrainerCallback."""

    def on_step_end(self, args, state, control):
        """Does nothing."""


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([lambda step: None], "cannot be called with a step and its metrics"),
        (OfTRL(), "an object of type OfTRL, which is not a function"),
        ([OfTRL], "cannot be called with a step and its metrics"),
    ],
)
def test_callbacks_are_checked_with_all_else_before_the_run(arguments, callbacks, words):
    settings = {**QUIET, "data": {**SIZES, "train_files": ["x.jsonl"]}}
    found = hybridflow.plan("grpo", settings, **arguments, callbacks=callbacks).problems
    assert words in str(found[0]) and ("on_step_end goes into it" in str(found[0])) == ("OfTRL" in repr(callbacks))
    assert "data= and the setting data.train_files are both given" in str(found[1])


def test_a_second_run_in_a_directory_is_refused_and_one_callback_needs_no_list(arguments):
    refused, settings = [], {**QUIET, "trainer.total_steps": 1}

    def nested(step, metrics):
        with pytest.raises(ResourceError, match="is being written by another run of this process") as found:
            hybridflow.run("grpo", settings, **arguments)
        refused.append(found.value.remedy)
        return numpy.arange(2)

    result = hybridflow.run("grpo", settings, **arguments, callbacks=nested)
    assert len(refused) == 1 and result.metrics["step"] == [1]


def test_a_column_that_only_the_evaluation_lacks_is_said_with_its_files(arguments):
    def of_gold(completions, gold):
        return [float(text == right) for text, right in zip(completions, gold, strict=True)]

    found = hybridflow.plan("grpo", data=[{"prompt": "1+1=", "gold": "2"}] * 128, reward=of_gold).problems
    assert "data.eval_files=[builtin:calculator/eval] does not have it" in str(found[0]), found
    assert "Without evaluation: data.eval_files=[]." in found[0].remedy and len(found) == 1


def test_a_drawing_is_of_the_class_that_is_given(arguments):
    class Twice(GRPO):
        def step(self, prompts):
            super().step(prompts)
            return super().step(prompts)

    once, twice = hybridflow.show("grpo"), hybridflow.show(Twice)
    assert len(twice.trace.calls) == 2 * len(once.trace.calls)
    assert once._repr_html_().startswith("<svg") and "rollout.generate" in repr(once)


def test_a_loop_of_ones_own_does_not_run_ahead(arguments):
    system = hybridflow.assemble("grpo", {"asynchrony.max_staleness": 1}, **arguments)
    with pytest.raises(ConfigError, match="asynchrony.max_staleness=1 is for the training loop") as caught, system:
        pass
    assert "hybridflow.run" in caught.value.remedy
