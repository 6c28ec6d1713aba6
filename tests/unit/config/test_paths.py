"""Paths as users write them, and the names of built-in files."""

from pathlib import Path

import pytest

from hybridflow.config.paths import builtin_path, user_path
from hybridflow.errors import ConfigError


def test_a_path_may_begin_at_home_and_need_not_exist():
    assert user_path("~/runs/first") == Path.home() / "runs" / "first"
    assert user_path("gone/away", key="trainer.run_dir") == Path("gone/away")


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        ("~nobodyx/a.jsonl", "model.path=~nobodyx/a.jsonl: there is no user 'nobodyx'", "./~name"),
        ("a" * 5000, "is too long for a path: it has 5000 bytes, and 5000 in one name", "at most 255 bytes"),
        ("/".join(["a" * 99] * 60), "is too long for a path: it has 5999 bytes", "and 4095 in total"),
        ("a\0b", "contains a NUL character", "Remove control characters"),
    ],
)
def test_a_path_that_cannot_be_is_refused_in_the_words_of_its_setting(text, found, remedy):
    with pytest.raises(ConfigError) as caught:
        user_path(text, key="model.path")
    assert caught.value.message.startswith("model.path=")
    assert found in caught.value.message and len(caught.value.message) < 400
    assert remedy in caught.value.remedy


def test_builtin_names_lie_in_the_package():
    assert builtin_path("builtin:calculator").parts[-3:] == ("assets", "calculator", "model")
    assert builtin_path("builtin:calculator/eval").parts[-4:] == ("hybridflow", "assets", "calculator", "eval.jsonl")


def test_an_unknown_builtin_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"builtin:calculater/train.*Did you mean 'builtin:calculator/train'\?"):
        builtin_path("builtin:calculater/train")
