"""The dataflow by name or from a user's file, and its settings."""

from pathlib import Path

import pytest

from hybridflow.dataflows.interface import role_needs
from hybridflow.dataflows.ppo import PPO
from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.dataflow import find_dataflow, make_settings
from hybridflow.launch.plan.plan import plan_run
from hybridflow.launch.step_trace import plan_to_show, trace_step

MINE = """
from dataclasses import dataclass, field
from typing import Annotated

from hybridflow.config.ranges import SHARE
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Policy, Scorer


class Mine(Dataflow):
    actor: Policy
    rollout: Sampler
    judge: Scorer

    @dataclass
    class Settings:
        threshold: Annotated[float, SHARE] = 0.5
        names: list[str] = field(default_factory=list)
        limit: int | None = None

    def step(self, prompts):
        return {}


class Plain(Dataflow):
    class Settings:
        pass

    def step(self, prompts):
        return {}


class Old(Mine):
    def foreknown(self, rows):
        return {}


class Labeled(Mine):
    data = "labeled"


class Other(Mine):
    data = "x"


class Rows(Mine):
    rows_per_prompt = "2"


class Raises(Mine):
    @classmethod
    @property
    def provides(cls):
        raise ValueError("no")


class Bare(Mine):
    def step(self):
        return {}


class Former(Mine):
    def wants_reference(self):
        return True


class Fine(Mine):
    @staticmethod
    def state():
        return {}

    @classmethod
    def precompute(cls, rows, *more):
        return {}

    def filter_out(self, batch, **numbers):
        return []


class Filters(Mine):
    def filter_out(self, batch):
        return []


class NotOne:
    pass


class NoStep(Dataflow):
    actor: Policy


class Half(NoStep):
    def collect(self, prompts):
        return prompts


class Odd(Half):
    def learn(self):
        return {}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_flow.py").write_text(MINE)
    return tmp_path / "my_flow.py"


def test_a_class_is_found_in_a_users_file_with_its_roles_and_settings(file):
    assert find_dataflow(f"{file}:Fine").__name__ == "Fine"
    found = find_dataflow(f"{file}:Mine")
    assert list(role_needs(found)) == ["actor", "rollout", "judge"]
    settings = make_settings(found, {"threshold": 1, "names": ["a"]})
    assert (settings.threshold, settings.names, settings.limit) == (1.0, ["a"], None)


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ({"treshold": 1}, "There is no setting 'dataflow_settings.treshold'", "Did you mean 'threshold'?"),
        ({"xyz": 1}, "There is no setting 'dataflow_settings.xyz'", "Settings of Mine: threshold, names, limit"),
        ({"threshold": "high"}, "dataflow_settings.threshold has the wrong type: Value 'high'", "takes a number."),
        ({"threshold": 1.5}, "dataflow_settings.threshold=1.5 is out of range", "Use a number above 0 and up to 1."),
        ({"limit": 1.5}, "dataflow_settings.limit has the wrong type: Value '1.5'", "a whole number or null."),
        ({"names": "a"}, "dataflow_settings.names", "dataflow_settings.names takes a list, each text."),
    ],
)
def test_a_wrong_setting_of_a_users_dataflow_is_named(file, given, message, remedy):
    with pytest.raises(ConfigError) as caught:
        make_settings(find_dataflow(f"{file}:Mine"), given)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_every_wrong_setting_of_a_dataflow_and_of_its_functions_is_collected():
    problems = Problems(collects=True)
    words = ["dataflow_settings={fracton: 1, fraction: 2}", "algorithm.loss_settings={bonus: 1, other: 1}"]
    plan_run(compose_run([*words, "algorithm.advantage_settings.x=1"], config_name="ppo"), problems, device="cpu")
    names = ("dataflow_settings.fracton", "dataflow_settings.fraction", "algorithm.advantage_settings.x")
    names += ("algorithm.loss_settings.bonus", "algorithm.loss_settings.other")
    assert [error.message for error in problems.found] == [f"There is no setting '{name}'." for name in names]


def test_settings_must_be_a_dataclass_and_by_default_there_are_none(file):
    with pytest.raises(ConfigError, match=r"dataflow_settings\.threshold.*Leave it out: PPO has no settings"):
        make_settings(PPO, {"threshold": 1})
    with pytest.raises(ConfigError, match="not a dataclass.*@dataclass"):
        make_settings(find_dataflow(f"{file}:Plain"), {})


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("ppoo", "dataflow=ppoo is unknown", "Did you mean 'ppo'?"),
        ("rloo", "dataflow=rloo is unknown, but an algorithm has that name", "Write algorithm=rloo"),
        ("group_norm", "dataflow=group_norm is unknown", "Write algorithm=grpo"),
        ("{folder}/my_flow:Mine", "must be a path to a function or class", "file.py:name"),
        ("{folder}/my_flow.py:Old", "Old defines 'foreknown', which is now called 'precompute'", "Rename the method."),
        ("{folder}/my_flow.py:Labeled", "Labeled.data='labeled' is unknown.", "Did you mean 'labelled'?"),
        ("{folder}/my_flow.py:Other", "'x' is unknown.", "from: prompts, demonstrations, preferences, labelled."),
        ("{folder}/my_flow.py:Rows", "Rows.rows_per_prompt='2' has the wrong type", "It must be int or None."),
        ("{folder}/my_flow.py:Raises", "Raises.provides raised ValueError: no (my_flow.py, line ", "Fix provides."),
        ("{folder}/my_flow.py:NotOne", "'NotOne' is not a dataflow", "class NotOne(Dataflow)"),
        ("{folder}/my_flow.py:Bare", "Bare.step cannot be called with (prompts)", "Write 'def step(self, prompts)'"),
        ("{folder}/my_flow.py:Former", "Former.wants_reference cannot", "@classmethod def wants_reference(cls, config"),
        (
            "{folder}/my_flow.py:Filters",
            "Filters.filter_out cannot be called with (batch, num_filtered=..., groups_per_step=...): got an",
            "Write 'def filter_out(self, batch, *, num_filtered, groups_per_step)'",
        ),
        ("{folder}/my_flow.py:NoStep", "NoStep does not define 'collect' and 'learn'", "or 'def step(self, prompts)'"),
        (
            "{folder}/my_flow.py:Half",
            "Half does not define 'learn'",
            "Write 'def collect(self, prompts)' and 'def learn",
        ),
        ("{folder}/my_flow.py:Odd", "Odd.learn cannot be called with (batch)", "Write 'def learn(self, batch)'"),
    ],
)
def test_a_dataflow_that_cannot_be_found_is_explained(file, name, message, remedy):
    with pytest.raises(ConfigError) as caught:
        find_dataflow(name.format(folder=file.parent))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("x: Tensor = None", r"Mine\.Settings\.x cannot be a setting: Unexpected type .*Tensor \(mine\.py, line 8\)"),
        ("x: 'Nope' = 1", r"Mine\.Settings\.x cannot be a setting: name 'Nope' is not .* \(mine\.py, line 8\)"),
        ("def __post_init__(self): int('x')", r"Mine\.Settings raised ValueError: .* \(mine\.py, line 8\)"),
    ],
)
def test_settings_that_cannot_be_made_are_named_with_their_line(body, found, tmp_path):
    imports = (
        "from dataclasses import dataclass",
        "from torch import Tensor",
        "from hybridflow.dataflows.ppo import PPO",
    )
    lines = (
        *imports,
        "class Mine(PPO):",
        "    @dataclass",
        "    class Settings:",
        "        ok: int = 1",
        f"        {body}",
    )
    (tmp_path / "mine.py").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=found):
        make_settings(find_dataflow(f"{tmp_path / 'mine.py'}:Mine"), {})


def test_the_error_for_settings_that_replace_those_of_the_base_class_says_how_to_extend_them(tmp_path):
    lines = ("from dataclasses import dataclass", "from hybridflow.dataflows.dapo import DAPO", "class Mine(DAPO):")
    settings = ("    @dataclass", "    class Settings:", "        gain: float = 1.0")
    step = ("    def step(self, prompts):", "        return {'gain': float(self.settings.max_refills)}")
    (tmp_path / "mine.py").write_text("\n".join([*lines, *settings, *step]))
    plan = plan_to_show(compose_run(["algorithm=grpo", f"dataflow={tmp_path / 'mine.py'}:Mine"], config_name="ppo"))
    with pytest.raises(ConfigError, match=r"class Settings\(DAPO\.Settings\)\. It has: gain\."):
        trace_step(plan)
