"""The roles that the class of a user's dataflow describes itself, and what the run says otherwise."""

from pathlib import Path

import pytest

from hybridflow.config.roles import RoleKind
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.plan.roles import plan_roles

MINE = """
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Policy, Scorer


class Mine(Dataflow):
    actor: Policy
    rollout: Sampler
    style: Scorer
    roles = {roles}

    def step(self, prompts):
        return {{}}
"""
STYLE = '{"style": {"kind": "reward_function", "functions": [f"{__file__}:f"], "weights": [2.0]}}'


def flow(folder: Path, roles: str = STYLE) -> str:
    """`dataflow=` with a class that says this of its roles."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MINE.format(roles=roles))
    return f"dataflow={folder}/mine.py:Mine"


def composed(*overrides: str, directory: Path | None = None) -> Composed:
    return compose_run(overrides, config_name="own" if directory else "ppo", config_dir=directory)


def written(folder: Path, text: str) -> Path:
    (folder / "own.yaml").write_text(f"defaults: [experiment, {{task: calculator}}, _self_]\n{text}")
    return folder


def test_the_class_describes_the_role_and_the_command_line_comes_before_it(tmp_path):
    found = composed(flow(tmp_path), "roles.style.functions=[format]")
    style = found.config.roles["style"]
    assert (style.kind, style.functions, style.weights) == (RoleKind.reward_function, ["format"], [2.0])
    origins = {name: found.origins[f"roles.style.{name}"] for name in ("functions", "kind", "weights", "pool")}
    assert origins == {"functions": "command line", "kind": "dataflow", "weights": "dataflow", "pool": "default"}
    assert found.origins.keys() == found.flat().keys()
    assert "kind: reward_function  # origin: dataflow" in config_text(found)
    assert composed().config.roles == {}


def test_a_file_comes_before_the_class(tmp_path):
    text = f"dataflow: {flow(tmp_path).partition('=')[2]}\nroles: {{style: {{weights: [0.5]}}}}\n"
    found = composed(directory=written(tmp_path, text))
    style = found.config.roles["style"]
    assert (style.kind, style.functions, style.weights) == (RoleKind.reward_function, [f"{tmp_path}/mine.py:f"], [0.5])
    assert (found.origins["roles.style.weights"], found.origins["roles.style.kind"]) == ("file", "dataflow")
    default = written(tmp_path, text.replace("[0.5]", "[]"))
    assert composed(directory=default).config.roles["style"].weights == []


def test_another_kind_of_role_keeps_nothing_of_the_description(tmp_path):
    model = "{kind: reward_model, model: {path: my/judge}}"
    for found in (
        composed(flow(tmp_path), f"roles.style={model}"),
        composed(flow(tmp_path), directory=written(tmp_path, f"roles: {{style: {model}}}\n")),
    ):
        style = found.config.roles["style"]
        assert (style.kind, style.model.path) == (RoleKind.reward_model, "my/judge")
        assert (style.functions, style.weights) == ([], [])


def test_another_kind_of_role_keeps_nothing_of_a_presets_either():
    cost = "roles.cost={weights: [2.0], functions: [format], kind: reward_model}"
    found = composed("algorithm=safe_rlhf", "roles.cost={kind: reward_model, model: {path: my/costs}}").config.roles
    assert (found["cost"].functions, found["cost_critic"].kind) == ([], RoleKind.critic)
    found = composed("algorithm=safe_rlhf", cost).config.roles["cost"]
    assert (found.functions, found.weights) == (["format"], [2.0])
    kept = composed("algorithm=safe_rlhf", "roles.cost={kind: reward_function, weights: [2.0]}").config.roles["cost"]
    assert kept.functions and kept.weights == [2.0]


@pytest.mark.parametrize(
    ("roles", "message", "remedy"),
    [
        ('{"style": {"knd": "reference"}}', "Mine.roles['style'] has no setting 'knd'", "Did you mean 'kind'?"),
        ('{"style": {"model": {"pth": "x"}}}', "has no setting 'model.pth'", "Did you mean 'model.path'?"),
        ('{"style": {"kind": "judge"}}', "Mine.roles['style'].kind=judge is unknown", "reward_function"),
        ('{"style": {"functions": [len]}}', "Mine.roles['style'].functions", "takes a list, each text."),
        ('{"style": "reward_function"}', "Mine.roles['style'] must be a mapping", "Give it some of: kind, model"),
        ('["style"]', "Mine.roles must be a mapping", "Write roles = {"),
    ],
)
def test_what_is_no_description_is_an_error_that_names_the_class(tmp_path, roles, message, remedy):
    with pytest.raises(ConfigError) as caught:
        composed(flow(tmp_path, roles))
    assert f"dataflow={tmp_path}/mine.py:Mine" in caught.value.message
    assert message in caught.value.message
    assert remedy in caught.value.remedy and "Mine" not in caught.value.remedy


def test_a_description_of_a_role_that_the_class_does_not_name_is_an_error(tmp_path):
    found = composed(flow(tmp_path, '{"stile": {"kind": "reward_function"}}')).config
    with pytest.raises(ConfigError, match=r"Mine\.roles describes 'stile', which Mine does not name") as caught:
        plan_roles(found, find_dataflow(found.dataflow), None)
    assert "It names: actor, rollout, style." in caught.value.remedy
