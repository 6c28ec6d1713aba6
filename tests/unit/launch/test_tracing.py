"""A step followed without a worker: calls, columns, times, roles."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.dataflows.interface import learns_from_samples
from hybridflow.errors import Advice, BatchError, ConfigError, WorkerError, explained
from hybridflow.graph.trace import DRIVER, Trace
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.trainers import command_of_dataflow
from hybridflow.launch.plan import defaults
from hybridflow.launch.plan.dataflow import DATAFLOWS, find_dataflow
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.step_trace import plan_to_show, step_problems, trace_step

POOLS = ["trainer.devices=3", "placement.pools.train.devices=2", "placement.pools.judge.devices=1"]
MINE = """
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Policy, FrozenModel, Scorer


class Mine(Dataflow):
    actor: Policy
    rollout: Sampler
    reward: Scorer
    reference: FrozenModel | None

    def step(self, prompts):
{body}


class Imitation(Dataflow):
    actor: Policy
    rollout: Sampler
    reward: Scorer

    def step(self, prompts):
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        scores = self.reward.score(batch).row("scores").view(-1, self.samples_per_prompt)
        assert (scores.max(1).values > scores.min(1).values).all()
        batch.row("rewards/exact_match") if "rewards/exact_match" in batch.columns else None
        further = self.streams["prompts"].next()
        assert not set(further.row("uid").tolist()) & set(prompts.row("uid").tolist())
        self.actor.supervised_step(batch.take([0, 5]))
        self.actor.publish_weights(version=self.iteration + 1)
        return {{}}
"""


def shown(*overrides: str, dataflow: str = "ppo") -> RunPlan:
    command = command_of_dataflow(dataflow)
    return plan_to_show(compose_run([*command.overrides, *overrides], config_name=command.trainer))


def traced(*overrides: str, dataflow: str = "ppo") -> Trace:
    return trace_step(shown(*overrides, dataflow=dataflow))


def names_by_time(trace: Trace) -> list[set[str]]:
    last = max(call.time for call in trace.calls)
    return [{call.name for call in trace.calls if call.time == time} for time in range(1, last + 1)]


def own(tmp_path, body: str = "return {}") -> str:
    tmp_path.mkdir(exist_ok=True)
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    (tmp_path / "mine.py").write_text(MINE.format(body=lines))
    return str(tmp_path / "mine.py")


def with_member(tmp_path: Path, member: str, step: str) -> str:
    """`dataflow=` of a class with this member and this step."""
    path = Path(own(tmp_path, step))
    path.write_text(path.read_text().replace("    def step", f"    {member}\n\n    def step", 1))
    return f"{path}:Mine"


def test_roles_of_one_pool_take_turns():
    trace = traced(dataflow="ppo")
    assert [call.name for call in trace.calls] == [
        "rollout.generate",
        "reward.score",
        "critic.values",
        "actor.logprobs",
        "critic.advantages",
        "critic.update",
        "actor.update",
        "actor.publish_weights",
    ]
    assert [call.time for call in trace.calls] == list(range(1, 9))
    assert trace.held_up == ((2, 3, 4), (6, 7))


def test_independent_calls_of_several_pools_run_at_once():
    judges = ["placement.roles.reward=judge", "placement.roles.reference=judge", "algorithm.kl.placement=reward"]
    assert names_by_time(traced(*POOLS, *judges, dataflow="grpo")) == [
        {"rollout.generate"},
        {"reward.score", "actor.logprobs"},
        {"reference.logprobs"},
        {"actor.advantages"},
        {"actor.update"},
        {"actor.publish_weights"},
    ]


def test_a_call_takes_the_columns_it_asks_for_from_those_who_made_them():
    calls = {call.name: call for call in traced(dataflow="ppo").calls}
    advantages, update = calls["critic.advantages"], calls["actor.update"]
    assert advantages.takes == {
        DRIVER: ("uid",), 1: ("response_mask", "rollout_logprobs"),
        2: ("scores",), 3: ("values",), 4: ("old_logprobs",),
    }  # fmt: skip
    assert advantages.adds == ("rewards", "advantages", "returns")
    assert update.takes[5] == ("rewards", "advantages")
    assert calls["reward.score"].takes_all and not advantages.takes_all
    assert calls["reward.score"].adds == ("scores", "rewards/exact_match")
    assert calls["actor.publish_weights"].after == (7,)
    trace = traced(dataflow="remax")
    (advantages,) = (call for call in trace.calls if call.name == "actor.advantages")
    assert "baselines" in advantages.takes[DRIVER] and "baselines" not in trace.data


def test_a_rollout_of_its_own_pool_receives_weights_while_they_are_sent():
    trace = traced(*POOLS, "placement.roles.rollout=judge", dataflow="grpo")
    assert names_by_time(trace)[-1] == {"actor.publish_weights", "rollout.receive_weights"}
    assert not any(call.method in ("is_ready", "join_rollout", "serve_weights") for call in trace.calls)


def test_roles_are_told_with_what_runs_them():
    roles = {role.name: role for role in traced(*POOLS, "placement.roles.reward=judge", dataflow="ppo").roles}
    assert (roles["actor"].pool, roles["actor"].runs_on) == ("train", "fsdp, data 2")
    assert roles["rollout"].runs_on == "transformers, in actor, replicas 2"
    assert (roles["reward"].kind, roles["reward"].pool, roles["reward"].runs_on) == ("Scorer", "judge", "functions")
    assert roles["reference"].pool is None
    trace = traced("actor.lora.rank=4", "algorithm.kl.placement=loss", dataflow="grpo")
    (reference,) = (role for role in trace.roles if role.name == "reference")
    assert reference.runs_on == "in actor, without its adapter"
    assert [call.adds for call in trace.calls if call.role == "reference"] == [("ref_logprobs",)]


@pytest.mark.parametrize("name", sorted(DATAFLOWS))
def test_every_dataflow_of_ours_can_be_followed(name):
    trace = traced(dataflow=name)
    learning = {"update", "supervised_step", "preference_step"}
    assert any(call.method in learning for call in trace.calls)
    assert not learns_from_samples(find_dataflow(name)) or any(call.name == "rollout.generate" for call in trace.calls)
    assert all(call.time > trace.calls[maker - 1].time for call in trace.calls for maker in call.takes if maker)


def test_neither_models_nor_data_are_looked_for():
    settings = ["model.path=/nowhere/model", "data.train_files=[/nowhere/rows.json]", "reward.functions=[exact_match]"]
    assert traced(*settings, dataflow="ppo").calls


def test_a_dataflow_of_the_users_own_runs_on_made_up_answers(tmp_path):
    trace = traced("rollout.samples_per_prompt=6", dataflow=f"{own(tmp_path)}:Imitation")
    assert [call.name for call in trace.calls][:3] == ["rollout.generate", "reward.score", "actor.supervised_step"]
    assert trace.title == "mine.py:Imitation"
    assert [call.time for call in trace.calls] == [1, 2, 3, 4]


def test_a_drawing_for_a_cpu_has_the_engines_of_a_cpu_on_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(defaults, "find_spec", lambda name: object())  # as where vLLM is installed
    engines = []
    for device in ("cpu", "auto"):
        roles = traced(f"trainer.device={device}", dataflow="grpo").roles
        engines += [role.engine for role in roles if role.name == "rollout"]
    assert engines == ["transformers, in actor", "vllm, in actor"]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "batch = self.rollout.generate(prompts)\nreturn prompts.nothing",
            ConfigError,
            r"its step cannot be traced: AttributeError.*\(mine\.py, line 14\)",
        ),
        ("self.rollout.sample(prompts)", ConfigError, "has no method 'sample'"),
        ("self.actor.advantages(prompts)", BatchError, "needs the columns"),
        ("self.actor.update(self.rollout.generate(prompts))", WorkerError, r"needs the columns.*\(mine\.py, line 13\)"),
    ],
)
def test_a_step_that_breaks_is_told_with_its_line_or_an_error_of_ours(tmp_path, body, error, message):
    with pytest.raises(error) as caught:
        traced(dataflow=f"{own(tmp_path, body)}:Mine")
    assert re.search(message, explained(caught.value).message, re.DOTALL)
    assert ("made-up prompts" in caught.value.remedy) is ("traced" in message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return {1: 1 / 0}", r"cannot be traced: ZeroDivisionError: division by zero \(mine\.py, line 13\)"),
        ("return {'x': {}['actor/pg_los']}", r"cannot be traced: KeyError: 'actor/pg_los' \(mine\.py, line 13\)"),
    ],
)
def test_a_step_that_made_up_answers_may_break_is_a_warning(tmp_path, line, message):
    (advice,) = step_problems(shown(dataflow=f"{own(tmp_path, line)}:Mine"), ROWS)
    assert isinstance(advice, Advice) and re.search(message, advice.message)


@pytest.mark.parametrize("line", ["return {'x': undefinedthing}", "import undefinedthing"])
def test_a_name_that_no_answer_can_define_is_an_error(tmp_path, line):
    with pytest.raises(ConfigError, match=r"its step fails: .*'undefinedthing'.* \(mine\.py, line 13\)"):
        checked(tmp_path, line)


STEP = """batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
batch = batch.join(self.reward.score(batch), self.actor.logprobs(batch))
batch = self.actor.advantages(batch)
metrics = self.actor.update(batch).result()
self.actor.publish_weights(version=self.iteration + 1)
return metrics | self.observe(batch) | {'mine/best': 0.5}"""
RLOO = "algorithm.advantage=rloo"
ROWS = Batch.of(rows={"uid": torch.arange(2)}, objects={"prompt": ["1+1=", "9+9="], "level": ["easy", "hard"]})


def warned(path: str | Path, *overrides: str) -> str:
    """The warnings of a user's step, which a run checks before it starts."""
    return "".join(str(found) for found in step_problems(shown(RLOO, *overrides, dataflow=f"{path}:Mine"), ROWS))


def checked(tmp_path, step: str, *overrides: str) -> None:
    assert not warned(own(tmp_path, step), *overrides)


def test_a_step_with_a_plain_number_among_its_metrics_is_fine_and_one_that_observes_nothing_is_warned_of(tmp_path):
    assert traced(RLOO, dataflow=f"{own(tmp_path, STEP)}:Mine").calls[-1].name == "actor.publish_weights"
    checked(tmp_path, STEP)
    bare = warned(own(tmp_path / "bare", STEP.replace(" | self.observe(batch)", "")))
    assert "never calls self.observe(batch)" in bare and "does not call" not in bare
    path = Path(own(tmp_path / "unused", STEP))
    path.write_text(path.read_text().replace("reference: FrozenModel | None", "teacher: FrozenModel"))
    found = warned(path, "roles.teacher.kind=reference")
    assert "Mine: the first step does not call 'teacher', although its workers start. Remove it" in found


@pytest.mark.parametrize(
    ("line", "instead", "message", "remedy"),
    [
        ("{'mine/best': 0.5}", "{'mine/best': 'much'}", "the metric 'mine/best' as str", "{'mine/best': float(...)}"),
        ("return metrics", "return 1 or metrics", "Mine.step returned int instead of", "a dictionary of numbers"),
        (
            "self.actor.publish_weights(version=self.iteration + 1)", "pass",
            "calls actor.update but does not publish", "self.actor.publish_weights(version=self.iteration + 1)",
        ),
        (
            "version=self.iteration + 1", "version=self.iteration",
            "publishes its new weights as version=0", "Write self.actor.publish_weights(version=self.iteration + 1).",
        ),
        (
            "version=self.iteration + 1", "version=1", "with self.iteration=1 the step publishes its new weights as"
            " version=1, but the current version is already 1", "version=self.iteration + 1",
        ),
        (
            "version=self.iteration + 1", "version=7 - self.iteration",
            "as version=6, but the current version is already 7", "version=self.iteration + 1",
        ),
    ],
)  # fmt: skip
def test_a_step_that_cannot_work_is_refused_before_it_costs_anything(tmp_path, line, instead, message, remedy):
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, STEP.replace(line, instead))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


WITHOUT_LOGPROBS = STEP.replace(", self.actor.logprobs(batch)", "")
ONE_STEP = ("actor.minibatch_size=null", "actor.epochs=1")


@pytest.mark.parametrize(
    ("overrides", "updates", "message", "remedy"),
    [
        (("data.batch_size=8", "actor.minibatch_size=4", "actor.epochs=1"), 1, "takes 2 optimizer steps", "=null"),
        (("actor.minibatch_size=null", "actor.epochs=3"), 1, "takes 3 optimizer", "join(self.actor.logprobs(batch))"),
        ((*ONE_STEP, "algorithm.correction.veto=1e-4"), 1, "compares the rollout with the policy", "actor.logprobs"),
        (ONE_STEP, 2, "was updated after its samples were drawn", "before the step's first call of actor.update"),
    ],
)
def test_a_step_without_the_log_probabilities_that_its_update_needs_is_refused(
    tmp_path, overrides, updates, message, remedy
):
    once = "metrics = self.actor.update"
    several = "self.actor.update(batch).result()\n" * (updates - 1) + once
    with pytest.raises(ConfigError, match=message) as caught:
        checked(tmp_path, WITHOUT_LOGPROBS.replace(once, several), *overrides)
    assert remedy in caught.value.remedy
    checked(tmp_path / "whole", STEP.replace(once, several), *overrides)


def test_a_step_without_log_probabilities_is_fine_where_nothing_needs_them(tmp_path):
    checked(tmp_path, WITHOUT_LOGPROBS, *ONE_STEP)
    several = ("data.batch_size=8", "actor.minibatch_size=4", "actor.epochs=1")
    checked(tmp_path, WITHOUT_LOGPROBS, *several, "algorithm.old_logprobs=rollout")
    first = WITHOUT_LOGPROBS.replace("self.actor.update(batch)", "self.actor.update(batch.take([0, 1]))")
    checked(tmp_path / "few", first, *several)


@pytest.mark.parametrize(
    ("overrides", "is_fine"), [(("rollout.engine=transformers",), True), (("rollout.engine=vllm",), False)], ids=str
)
def test_a_kl_penalty_in_the_reward_reads_the_rollout_only_where_that_is_right(tmp_path, overrides, is_fine):
    scored = "self.reward.score(batch)"
    step = WITHOUT_LOGPROBS.replace(scored, f"{scored}, self.reference.logprobs(batch)")
    refused = pytest.raises(ConfigError, match="placement=reward needs the column 'old_logprobs'")
    with nullcontext() if is_fine else refused:
        checked(tmp_path, step, *ONE_STEP, "algorithm.kl.placement=reward", *overrides)


@pytest.mark.parametrize(
    ("read", "message", "remedy"),
    [
        ("self.settings.bonsu", r"reads self\.settings\.bonsu, .*\(mine\.py, line", "Did you mean 'bonus'?"),
        (
            "prompts = self.rollout.generate(prompts)\nprompts.row('scoers')",
            r"'scoers'.*\(mine\.py, line",
            "batch.fetch(",
        ),
        ("self.rewrad", r"reads self\.rewrad, which does not exist", "Did you mean 'reward'?"),
    ],
)
def test_a_misspelt_setting_or_role_of_the_step_is_refused_before_the_run(tmp_path, read, message, remedy):
    settings = "from dataclasses import dataclass\n    @dataclass\n    class Settings:\n        bonus: float = 0.5"
    dataflow = with_member(tmp_path, settings, f"{read}\n{STEP}")
    with pytest.raises((ConfigError, BatchError), match=message) as caught:
        list(step_problems(shown(RLOO, dataflow=dataflow), ROWS))
    assert remedy in caught.value.remedy


def test_what_the_first_step_sets_is_there_in_the_second_which_is_not_drawn(tmp_path):
    """A step may begin something once, learn in some steps only, and publish under any rising version."""
    begun = "self.seen = [] if self.iteration == 0 else self.seen\nself.seen.append(prompts)\n"
    only_once = "if self.iteration == 0:\n    self.actor.publish_weights(version=10 * self.iteration + 5)"
    step = STEP.replace("self.actor.publish_weights(version=self.iteration + 1)", only_once)
    trace = traced(RLOO, dataflow=f"{own(tmp_path, begun + step)}:Mine")
    assert [call.name for call in trace.calls].count("actor.publish_weights") == 1
    rising = STEP.replace("self.iteration + 1", "10 * self.iteration + 5")
    assert traced(RLOO, dataflow=f"{own(tmp_path / 'rising', rising)}:Mine").calls[-1].name == "actor.publish_weights"


def test_an_estimator_that_needs_a_critic_is_refused_without_one(tmp_path):
    with pytest.raises(ConfigError, match="algorithm.advantage=gae needs the column 'values'") as caught:
        traced("algorithm.advantage=gae", dataflow=f"{own(tmp_path, STEP)}:Mine")
    assert "algorithm.advantage=rloo" in caught.value.remedy


def test_an_annotation_that_names_nothing_is_an_error_of_ours(tmp_path):
    path = Path(own(tmp_path, STEP))
    path.write_text(path.read_text().replace("reward: Scorer", "reward: 'Score'"))
    with pytest.raises(ConfigError, match="An annotation of Mine cannot be read: name 'Score'") as caught:
        traced(RLOO, dataflow=f"{path}:Mine")
    assert "Sampler, Scorer" in caught.value.remedy


def test_a_step_may_read_what_its_dataflow_computed_before(tmp_path):
    first = "assert (prompts.row('double') == 2 * prompts.row('uid')).all()\n"
    computed = "def precompute(self, rows):\n        return {'double': 2 * rows.row('uid')}"
    assert not list(step_problems(shown(RLOO, dataflow=with_member(tmp_path, computed, first + STEP)), ROWS))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("{'double': [1, 2]}", "'double' as list for 4 rows"),
        ("{'double': rows.row('uid').sum()}", "'double' as a single number for 4 rows"),
        ("{'double': rows.row('uid')[1:]}", "'double' with 3 rows for 4 rows"),
        ("{'uid': rows.row('uid')}", "'uid', a column that the rows already have"),
        ("None", "NoneType, not a mapping"),
    ],
)
def test_precomputed_results_must_be_new_columns_of_the_rows(tmp_path, result, message):
    dataflow = with_member(tmp_path, f"def precompute(self, rows):\n        return {result}", STEP)
    with pytest.raises(ConfigError, match=rf"Mine\.precompute returned {message}"):
        list(step_problems(shown(RLOO, dataflow=dataflow), ROWS))


def test_a_constructor_that_raises_is_an_error_before_the_run(tmp_path):
    broken = "def __init__(self, *roles, **settings):\n        raise ValueError('no')"
    with pytest.raises(ConfigError, match=r"Mine\.__init__ raised ValueError: no \(mine\.py, line 13\)"):
        list(step_problems(shown(RLOO, dataflow=with_member(tmp_path, broken, STEP)), ROWS))


def test_a_step_may_read_further_columns_of_the_data(tmp_path):
    levels = "assert prompts.object('level') == ['easy', 'hard', 'easy', 'hard']\n"
    checked(tmp_path, levels + STEP)
    with pytest.raises(BatchError, match="needs the columns \\['color'\\]"):
        checked(tmp_path / "other", levels.replace("level", "color") + STEP)
    unread = shown(RLOO, dataflow=f"{own(tmp_path / 'unread', levels + STEP)}:Mine")
    assert not list(step_problems(unread, None))  # the data could not be read
