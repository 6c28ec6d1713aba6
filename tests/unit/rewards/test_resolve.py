import sys

import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError, Problems
from hybridflow.rewards.resolve import check_settings, resolve_functions
from hybridflow.rewards.scorer import RewardScorer

LENGTHS = "def lengths(prompts, completions, **columns):\n    return [len(text) for text in completions]\n"


def refused(*functions):
    with pytest.raises(ConfigError) as caught:
        resolve_functions(Reward(functions=list(functions)))
    return caught.value


def written(path, text):
    path.write_text(text)
    return path


def test_a_function_in_a_file_by_dotted_path_or_made_by_a_class(tmp_path, monkeypatch):
    text = LENGTHS + "class Lengths:\n    def __call__(self, completions, **columns):\n        return [1.0, 2.0]\n"
    path = written(tmp_path / "my_rewards_by_path.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    functions = [f"{path}:lengths", "my_rewards_by_path.lengths", f"{path}:Lengths"]
    scorer = RewardScorer(Reward(functions=functions, processes=0))
    assert scorer.names == ["lengths", "lengths_2", "Lengths"]
    columns = scorer.score(["p", "p"], ["ab", "abc"], {}).columns
    assert [column.tolist() for column in columns.values()] == [[2, 3], [2, 3], [1, 2]]


def test_functions_of_one_file_share_its_module(make_scorer):
    text = "seen = []\ndef a(completions, **c):\n    seen.append(1)\n    return [0.0] * len(completions)\n"
    text += "def b(completions, **c):\n    return [len(seen)] * len(completions)\n"
    assert make_scorer(text, ("a", "b")).score(["p"], ["c"], {}).scores.tolist() == [1]


@pytest.mark.parametrize(
    ("setting", "found", "remedy"),
    [
        ("exact_mach", "there is no built-in function 'exact_mach'", "Did you mean 'exact_match'?"),
        ("{}/rewrad.py:lengths", "there is no file", "Did you mean 'reward.py'?"),
        ("{}/nofile.py:lengths", "there is no file", "'{}' has: reward.py. Name a file that exists."),
        ("{}/reward.py:length", "there is no 'length' in it", "Did you mean 'lengths'? It has: lengths"),
        ("{}/reward.py", "names a file only", "reward.py:name."),
        ("no_such_package.rewards.f", "No module named 'no_such_package'", "installed"),
        ("{}/reward.py:WEIGHT", "is of type int, not a function", "Name a function."),
        ("verl:{}/reward.py:lengths", "do not match that of verl", "compute_score(data_source"),
    ],
)
def test_what_names_no_function_is_an_error_with_the_nearest(tmp_path, setting, found, remedy):
    written(tmp_path / "reward.py", "WEIGHT = 3\n" + LENGTHS)
    error = refused(setting.format(tmp_path))
    assert found in error.message and remedy.format(tmp_path) in error.remedy


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (reward.py, line 1)"),
        (
            "import not_installed_at_all\n",
            "ModuleNotFoundError: No module named 'not_installed_at_all' (reward.py, line 1)",
        ),
        ("\nraise RuntimeError('no')\n", "RuntimeError: no (reward.py, line 2)"),
    ],
)
def test_a_file_that_cannot_be_run_shows_why_and_where(tmp_path, text, found):
    path = written(tmp_path / "reward.py", text)
    error = refused(f"{path}:f")
    assert found in error.message and error.remedy
    assert not [name for name in sys.modules if name.startswith("hybridflow_user_") and "reward_" in name and
                sys.modules[name].__file__ == str(path)]  # fmt: skip


@pytest.mark.parametrize(
    "signature", ["a, b", "prompt, completion, **columns", "completions, /", "solution_str, ground_truth, needed"]
)
def test_parameters_of_no_known_kind_are_refused_with_the_known_ones(tmp_path, signature):
    path = written(tmp_path / "reward.py", f"def f({signature}):\n    return 0.0\n")
    error = refused(f"{path}:f")
    assert f"({signature})" in error.message
    assert "f(prompts, completions, **columns)" in error.remedy and "compute_score(data_source" in error.remedy


def test_no_functions_at_all_are_an_error():
    assert "exact_match" in refused().remedy


def test_a_required_column_the_data_lacks_is_named_before_anything_is_scored(make_scorer):
    scorer = make_scorer("def f(completions, solutoin):\n    return [0.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=r"needs the column 'solutoin'.*Did you mean 'solution'\?"):
        scorer.check_columns(["answer", "solution"])
    scorer.check_columns(["solutoin"])


OPENRLHF_BUT_FOR_NAMES = (
    "def f(queries, prompts, labels=None, completions=None):\n    return [len(q) for q in queries]\n"
)


def test_a_dialect_before_the_path_says_how_to_call_the_function(tmp_path):
    path = written(tmp_path / "reward.py", OPENRLHF_BUT_FOR_NAMES)
    config = Reward(functions=[f"openrlhf:{path}:f"], processes=0)
    assert resolve_functions(Reward(functions=[f"{path}:f"]))[0].dialect.name == "TRL"
    assert resolve_functions(config)[0].dialect.name == "OpenRLHF"
    assert RewardScorer(config).score(["ab"], ["c"], {}).scores.tolist() == [3]


def test_settings_reach_a_users_function_by_its_short_name(make_scorer):
    text = "def f(completions, scale: float = 1.0, **columns):\n    return [scale * len(c) for c in completions]\n"
    scorer = make_scorer(text, settings={"f": {"scale": 2.5}})
    assert scorer.score(["p"], ["ab"], {"scale": [7]}).scores.tolist() == [5.0]


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"overlong": {"bufer_tokens": 3}}, "no setting 'reward.settings.overlong.bufer_tokens'", "'buffer_tokens'?"),
        ({"overlong": {"buffer_tokens": "3"}}, "buffer_tokens='3' is of type str", "Give int or null."),
        ({"overlong": {"penalty": True}}, "penalty=True is of type bool", "Give float."),
        ({"exact_match": {"a": 1}}, "no setting 'reward.settings.exact_match.a'", "Leave it out: exact_match has no"),
        ({"overlong": 3}, "reward.settings.overlong=3 must be a mapping", "Settings of overlong: max_response_tokens"),
        ({"overlong": {"buffer_tokens": 9}}, "must be between 1 and 8", "Use 1 to 8"),
        ({}, "does not know the longest response", "reward.settings.overlong.max_response_tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, found, remedy):
    if isinstance(settings.get("overlong"), dict):
        settings["overlong"]["max_response_tokens"] = 8
    with pytest.raises(ConfigError) as caught:
        resolve_functions(Reward(functions=["exact_match", "overlong"], settings=settings))
    assert found in caught.value.message and remedy in caught.value.remedy


def test_every_wrong_setting_of_a_function_is_collected():
    problems = Problems(collects=True)
    given = {"overlong": {"bufer_tokens": 3, "penalty": True, "x": 1, "max_response_tokens": 8}}
    resolve_functions(Reward(functions=["overlong"], settings=given), problems)
    assert [name for name in given["overlong"] for e in problems.found if f".{name}" in e.message] == [
        *given["overlong"]
    ][:3]


def test_settings_of_a_function_that_the_run_does_not_have_are_refused(caplog):
    rewards = [Reward(functions=["gsm8k"], settings={"overlnog": {}}), Reward(functions=["exact_match"])]
    with pytest.raises(ConfigError, match="no function of the run is called 'overlnog'") as caught:
        check_settings(rewards)
    assert "Did you mean 'overlong'?" in caught.value.remedy and "gsm8k, exact_match" in caught.value.remedy
    check_settings([Reward(functions=["gsm8k"], settings={"overlong": {}})])
    assert "reward.settings.overlong has no effect" in caplog.text
