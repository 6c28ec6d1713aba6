"""Methods by name, by file and by path: what they are called with, and what is said of those that cannot be called."""

from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.config.choices import chosen, is_own
from hybridflow.engines.training.interface import Loss
from hybridflow.errors import ConfigError
from hybridflow.workers.named_functions import estimator, policy_loss, token_numbers
from hybridflow.workers.objectives import Denominators, policy_objective

OWN = """
import torch

LIMIT = 3


def shifted(scores, mask, *, shift=0.5, name="mean", every: bool = False):
    return (scores[:, None] - shift) * mask


def plain_reinforce(logprobs, advantages, *, scale=1.0):
    return -scale * advantages * logprobs


def constant(logprobs, mask):
    return torch.ones_like(logprobs) * mask


def needs_more(scores, mask, temprature):
    return scores


def by_position(scores, mask, /):
    return scores


class Callable:
    def __call__(self, scores, mask, wanted):
        return scores


an_object = Callable()
"""

SCORES, MASK = torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def surrogate(name: str) -> Loss:
    """A policy objective with the loss of that name, of two rows."""
    loss_fn = policy_objective(Algorithm(policy_loss=name), Denominators(3.0, 2.0), norm_tokens=2.0)
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    outputs = {"logprobs": logprobs, "entropy": torch.zeros(2, 2)}
    return loss_fn(outputs, {"response_mask": MASK, "advantages": torch.ones(2, 2)})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's own, which is also a module that can be imported."""
    file = tmp_path / f"own_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_an_estimator_is_given_what_it_names_and_nothing_else():
    bound = estimator(Algorithm(advantage="rloo"))
    assert bound.parameters == bound.needs == {"scores", "mask", "group_ids"}
    offered = {"scores": SCORES, "mask": MASK, "group_ids": torch.tensor([0, 0]), "gamma": 1.0, "values": None}
    found = bound(offered)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[1.0, 1.0], [-1.0, 0.0]]


@pytest.mark.parametrize("name", ["group_norm", "grpo"])
def test_a_synonym_is_the_method_it_names(name):
    assert estimator(Algorithm(advantage=name)).name == "grpo"


def test_a_users_estimator_comes_from_a_file_or_by_a_dotted_path(own):
    for name in (f"{own}:shifted", f"{own.stem}.shifted"):
        bound = estimator(Algorithm(advantage=name))
        assert bound.name == name
        found = bound({"scores": SCORES, "mask": MASK})
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == [[0.5, 0.5], [-0.5, 0.0]]


def test_parameters_with_a_default_are_settings(own):
    bound = estimator(Algorithm(advantage="grpo", advantage_settings={"divide_by_std": False}))
    found = bound({"scores": SCORES, "mask": MASK, "group_ids": torch.tensor([0, 0])})
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    bound = policy_loss(Algorithm(policy_loss=f"{own}:plain_reinforce", loss_settings={"scale": 2}))
    found = bound({"logprobs": -torch.ones(1, 1), "advantages": torch.ones(1, 1), "old_logprobs": None})
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[2.0]]


def refused(algorithm: Algorithm) -> ConfigError:
    """What is said of a method that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        estimator(algorithm)
        policy_loss(algorithm)
    return caught.value


def test_a_parameter_that_nobody_gives_is_named_with_the_signature_and_what_there_is(own):
    error = refused(Algorithm(advantage=f"{own}:needs_more"))
    assert "parameter 'temprature'" in error.message
    assert "needs_more(scores, mask, temprature)" in error.message
    for word in ("rewards", "group_ids", "components", "sum_pi_squared", "algorithm.advantage_settings"):
        assert word in error.remedy
    error = refused(Algorithm(policy_loss=f"{own}:needs_more"))
    assert "algorithm.policy_loss=" in error.message
    assert "logprobs, entropy, mask" in error.remedy
    assert "parameter 'scores'" in refused(Algorithm(advantage=f"{own}:by_position")).message
    message = refused(Algorithm(advantage=f"{own}:an_object")).message
    assert "'wanted'" in message and "Callable(scores, mask, wanted)" in message


@pytest.mark.parametrize(
    ("name", "settings", "found", "remedy"),
    [
        ("grpo", {"divide_by_sd": False}, "advantage_settings.divide_by_sd", "Did you mean 'divide_by_std'?"),
        ("grpo", {"bonus": 1}, "There is no setting", "Settings of algorithm.advantage=grpo: divide_by_std, eps"),
        ("rloo", {"eps": 1}, "There is no setting", "Leave it out: algorithm.advantage=rloo has no settings."),
        ("grpo", {"divide_by_std": "no"}, "divide_by_std=no has the wrong type (str)", "Give true or false"),
        ("grpo", {"eps": "small"}, "advantage_settings.eps=small has the wrong type (str)", "the default is 1e-06"),
        ("grpo", {"eps": True}, "advantage_settings.eps=True has the wrong type (bool)", "Give a number"),
        ("gae", {"gamma": 0.9}, "There is no setting", "Leave it out: algorithm.advantage=gae has"),
        ("gae", {"rewards": 3}, "There is no setting", "Leave it out: algorithm.advantage=gae has"),
        ("gdpo", {"weights": 0.5}, "advantage_settings.weights=0.5 has the wrong type (float)", "Give a list"),
        ("{own}:shifted", {"shft": 1.0}, "advantage_settings.shft", "Did you mean 'shift'?"),
        ("{own}:shifted", {"name": 3}, "advantage_settings.name=3", "Give text; the default is 'mean'."),
    ],
)
def test_a_wrong_setting_is_told(own, name, settings, found, remedy):
    error = refused(Algorithm(advantage=name.format(own=own), advantage_settings=settings))
    assert found in error.message
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("{own}:shiftd", "there is no 'shiftd' in it", "Did you mean 'shifted'?"),
        ("{own}:LIMIT", "is of type int", "Name a function"),
        ("{folder}/absent.py:f", "there is no file", "Name a file that exists."),
        ("{own}", "names a file only", ":name"),
        ("no_such_package.f", "cannot be imported", "installed or in the current directory"),
        ("builtins.max", "parameters cannot be read", "written in Python"),
        ("{folder}/torn.py:f", "torn.py, line 3", "python "),
        ("math.gcd", "gcd(integers) has no parameter for the batch", "Parameters may be: rewards, scores"),
    ],
)
def test_what_is_no_function_is_told(own, name, found, remedy):
    (own.parent / "torn.py").write_text("import math\n\nmath.sqrt(-1)\n")
    error = refused(Algorithm(advantage=name.format(own=own, folder=own.parent)))
    assert "algorithm.advantage=" in error.message
    assert found in error.message
    assert remedy in error.remedy


def test_names_are_told_apart_from_functions_of_the_users_own():
    assert [is_own(name) for name in ("grpo", "a.py:f", "package.f", "reinforce++")] == [False, True, True, False]
    assert chosen("reinforce++", "algorithm.advantage", ADVANTAGES) == "reinforce_plus_plus"
    assert chosen("vanilla", "algorithm.policy_loss", POLICY_LOSSES) == "ppo"
    with pytest.raises(ConfigError, match=r"algorithm.advantage=grp is unknown.*Did you mean 'grpo'\?"):
        chosen("grp", "algorithm.advantage", ADVANTAGES)


def test_a_penalty_in_rewards_that_the_estimator_does_not_read_is_refused():
    kl = KL(placement=KLPlacement.reward)
    error = refused(Algorithm(advantage="gdpo", kl=kl))
    assert "algorithm.advantage=gdpo reads neither rewards nor scores" in error.message
    assert "algorithm.kl.placement=loss" in error.remedy
    assert estimator(Algorithm(advantage="grpo", kl=kl)).name == "grpo"


def test_a_users_loss_without_a_gradient_is_refused(own):
    with pytest.raises(ConfigError, match="constant returned a loss that has no gradient") as caught:
        surrogate(f"{own}:constant")
    assert f"algorithm.policy_loss={own}:constant" in caught.value.message
    assert "without detach()" in caught.value.remedy


def test_a_users_loss_is_aggregated_as_ours_are(own):
    # -A log p over three tokens: (1 + 2 + 3) / 3
    assert surrogate(f"{own}:plain_reinforce").value.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (torch.zeros(2), r"shape \[2\]"),
        (torch.zeros(2, 3), r"shape \[2, 3\]"),
        (None, "type NoneType"),
        ([0.0], "type list"),
    ],
)
def test_an_answer_of_another_shape_is_told(answer, found):
    with pytest.raises(ConfigError, match=rf"f returned a value of {found}.*\[2, 2\]"):
        token_numbers(answer, MASK, of="f")


def test_a_number_that_is_not_finite_is_told_with_its_place():
    answer = torch.tensor([[0.0, torch.nan], [0.0, torch.inf]])
    with pytest.raises(ConfigError, match="f returned nan for token 1 of row 0; 1 of 3 tokens.*divisions by 0"):
        token_numbers(answer, MASK, of="f")
    outside = torch.tensor([[0.0, 0.0], [0.0, torch.inf]])
    assert token_numbers(outside, MASK, of="f") is outside
