"""Names of the hub; what they name is read from a folder laid out like a dataset there."""

import json
import logging
from pathlib import Path

import pytest
from huggingface_hub import constants

from hybridflow.data.hub import HubName, check_splits_named, hub_name, revision
from hybridflow.data.sources import read_table
from hybridflow.errors import ConfigError, DataError

CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]}
- {config_name: hard, data_files: [{split: test, path: hard/test.jsonl}]}
---
"""


@pytest.fixture
def sums(tmp_path, monkeypatch) -> Path:
    """A dataset `somebody/sums` of two configurations, below the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    folder = Path("somebody/sums")
    for part in ("main/train", "main/test", "hard/test"):
        file = folder / f"{part}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"question": part, "answer": "2"}) + "\n")
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openai/gsm8k", HubName("openai/gsm8k")),
        ("openai/gsm8k?split=test", HubName("openai/gsm8k", split="test")),
        ("openai/gsm8k?config=main&split=test", HubName("openai/gsm8k", "main", "test")),
        ("a/b?split=train[:10%]+test", HubName("a/b", split="train[:10%]+test")),
        ("nowhere/train.jsonl", None),
        ("nowhere/train.jsonl?split=test", None),
        ("train", None),
        ("/nowhere/at/all", None),
    ],
)
def test_a_name_says_which_configuration_and_split(name, found):
    assert hub_name(name) == found


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("a/b?splt=test", "a dataset has no option 'splt'", "Did you mean 'split'? Write a/b?config=main&split=test"),
        ("a/b?split=", "the option 'split' has no value", "Write a/b?config=main&split=test"),
        ("a/b?", "a dataset has no option ''", "Write a/b?config=main&split=test"),
    ],
)
def test_options_that_do_not_exist_are_named(name, found, remedy):
    with pytest.raises(ConfigError) as caught:
        hub_name(name)
    assert f"'{name}': {found}" in caught.value.message and remedy in caught.value.remedy


def test_held_out_data_names_its_split(sums):
    check_splits_named(["openai/gsm8k?config=main&split=test", "nowhere/test.jsonl", str(sums)], key="data.eval_files")
    for name, typed in (("openai/gsm8k", "openai/gsm8k?split=test"), ("a/b?config=c", "a/b?config=c&split=test")):
        with pytest.raises(ConfigError, match=r"data.eval_files: .* no split is given for evaluation") as caught:
            check_splits_named([name], key="data.eval_files")
        assert f"'data.eval_files=[\"{typed}\"]'" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        check_splits_named(["openai/gsm8k"], key="--prompts")
    assert caught.value.remedy == "Add the split: --prompts 'openai/gsm8k?split=test'; or correct the path."


def test_what_was_named_is_read(sums):
    for name, row in (
        ("somebody/sums?config=main", "main/train"),
        ("somebody/sums?config=main&split=test", "main/test"),
        (f"{sums.absolute()}?config=hard&split=test", "hard/test"),
    ):
        table = read_table(name)
        assert table.columns == {"question": [row], "answer": ["2"]}
        assert (table.name, table.data_source) == (name, "sums")


def test_a_hub_that_cannot_be_reached_is_asked_once_and_named_in_one_line(monkeypatch, tmp_path, caplog, capfd):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DataError, match="no dataset of that name could be loaded from the hub.*Offline"):
        read_table("no_such_owner/no_such_data")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("http://127.0.0.1:1 cannot be reached (") and "Retry" not in capfd.readouterr().err
    assert not constants.HF_HUB_OFFLINE


def test_a_dataset_has_a_revision(sums):
    first = revision(HubName("somebody/sums", "main"))
    assert len(first) > 8 and revision(HubName("somebody/sums", "main")) == first


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("split=test", "available configs: ['main', 'hard']"),
        ("config=main&split=vali", "Should be one of ['train', 'test']"),
        ("config=hrd&split=test", "Available: ['main', 'hard']"),
    ],
)
def test_what_a_dataset_does_not_have_is_answered_with_what_it_has(sums, options, reason):
    with pytest.raises(DataError) as caught:
        read_table(f"somebody/sums?{options}")
    assert f"'somebody/sums?{options}' cannot be read as a dataset" in caught.value.message
    assert reason in caught.value.message and "?config=main&split=test" in caught.value.remedy
