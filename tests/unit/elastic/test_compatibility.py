"""Which settings and files may differ from a checkpoint's when a run is resumed."""

import os
from dataclasses import asdict

import pytest

from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import ResumeChanged
from hybridflow.elastic import compatibility
from hybridflow.elastic.compatibility import (
    FIXED,
    Change,
    check_compatible,
    check_unchanged,
    file_fingerprint,
    flat,
    with_moves_undone,
)
from hybridflow.errors import CheckpointError

CONFIG = {
    "dataflow": "ppo",
    "model": {"path": "builtin:calculator"},
    "trainer": {"seed": 0, "total_steps": 100, "trackers": ["console"]},
    "roles": {},
}


def test_settings_that_may_change_are_found_at_any_depth():
    changed = {"total_steps": 200, "devices": 2, "trackers": ["jsonl"]}
    assert check_compatible(CONFIG, CONFIG | {"trainer": CONFIG["trainer"] | changed}) == [
        Change("trainer.devices", None, 2),
        Change("trainer.total_steps", 100, 200),
        Change("trainer.trackers", ["console"], ["jsonl"]),
    ]
    assert check_compatible(CONFIG, CONFIG) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"path": "other"}}, r"model\.path was 'builtin:calculator' and is 'other'"),
        ({"dataflow": "grpo"}, "dataflow was 'ppo' and is 'grpo'"),
        ({"data": {"mixture": [0.5, 0.5]}}, r"data\.mixture was None and is \[0\.5, 0\.5\]"),
        ({"trainer": {"seed": 1}}, r"trainer\.seed was 0 and is 1"),
    ],
)
def test_settings_the_checkpoint_depends_on_may_not_change(change, words):
    with pytest.raises(CheckpointError, match=words + r".*trainer\.resume=never"):
        check_compatible(CONFIG, CONFIG | change)


def test_other_settings_do_not_hide_other_inputs():
    with pytest.raises(CheckpointError, match="other settings: dataflow") as caught:
        check_compatible(CONFIG, CONFIG | {"dataflow": "grpo", "data": {"max_rows": 5}})
    (further,) = caught.value.further
    assert "other inputs: data.max_rows was None and is 5" in further.message


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("data", "filters", ["fl.py:high"]),
        ("data", "max_rows", 5),
        ("data", "chat_template", "b.jinja"),
        ("data", "system_prompt", "Be brief."),
        ("data", "as_chat", True),
        ("environment", "name", "frozen_lake"),
        ("environment", "program", "python agent.py"),
        ("environment", "mcp", ["python server.py"]),
        ("environment", "credit", "turn"),
        ("environment", "settings", {"moves": 16}),
        ("reward", "functions", ["rb.py:score"]),
        ("reward", "process", True),
        ("reward", "model", {"path": "other"}),
        ("roles", "judge", {"functions": ["rb.py:score"]}),
        ("roles", "judge", {"process": True}),
        ("roles", "judge", {"kind": "reward_model"}),
        ("algorithm", "policy_loss", "own.py:loss"),
    ],
)
def test_settings_that_choose_inputs_change_only_when_that_is_accepted(section, name, value):
    now = CONFIG | {section: {name: value}}
    with pytest.raises(CheckpointError, match=rf"other inputs: {section}\.{name}.* was None and is ") as caught:
        check_compatible(CONFIG, now)
    assert "trainer.resume_changed=accept" in caught.value.remedy and "trainer.resume=never" in caught.value.remedy
    changes = check_compatible(CONFIG, now, ResumeChanged.accept)
    assert [change.key.startswith(f"{section}.{name}") for change in changes if change.now] == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"weights": [2.0], "settings": {"score": {"attempts": 3}}}},
        {"algorithm": {"policy_loss": "gspo", "kl": {"coefficient": 0.1}}},
        {"actor": {"optimizer": {"learning_rate": 1e-6}}},
        {"data": {"eval_files": ["held_out.jsonl"], "eval_limit": 8}},
        {"rollout": {"sampling": {"temperature": 0.9}}},
        {"environment": {"max_turns": 4, "processes": 2}},
    ],
)
def test_settings_of_training_may_change_by_intent(change):
    assert check_compatible(CONFIG, CONFIG | change)


def test_an_empty_setting_that_the_checkpoint_does_not_know_is_no_change():
    check_compatible(CONFIG, CONFIG | {"data": {"mixture": [], "curriculum_steps": 0}})


def test_the_settings_that_may_not_change_are_all_in_the_configuration():
    assert len([key for key in flat(asdict(Experiment())) if FIXED.fullmatch(key)]) == 26


@pytest.mark.parametrize(
    ("old", "new", "is_moved"),
    [
        ("a/x.jsonl", "b/c/x.jsonl", True),
        ("a/x?split=train", "b/x?split=train", True),
        ("x?split=a/b", "x?split=c/b", False),
        ("verl:a/x.py:f", "verl:b/x.py:f", True),
        ("python a/x.py", "python b/x.py", True),
        ("python a/x.py", "python3 b/x.py", False),
        ("python a/x.py", "python b/x.py --easy", False),
    ],
)
def test_only_directories_may_differ(old, new, is_moved):
    digests = {"": "sha"}
    before, after = (
        {word.removeprefix("verl:").removesuffix(":f"): digests for word in path.split()} for path in (old, new)
    )
    settings = with_moves_undone({"files": [old]}, {"files": [new]}, ["files"], before, after)
    assert settings["files"] == ([old] if is_moved else [new])


def test_each_byte_of_a_small_file_counts(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    whole = file_fingerprint(tmp_path / "a")
    for place in (0, 500, 999):
        (tmp_path / "a").write_bytes(bytes(place) + b"\1" + bytes(999 - place))
        assert file_fingerprint(tmp_path / "a") != whole
    (tmp_path / "a").write_bytes(bytes(1000))
    assert file_fingerprint(tmp_path / "a") == whole


def test_a_file_too_large_to_hash_whole_is_sampled_from_start_to_end_and_dated(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(compatibility, "_BLOCK_BYTES", 16)
    path, size = tmp_path / "pytorch_model.bin", 1 << 20

    def fingerprint(content: bytes, modified: int = 5) -> str:
        path.write_bytes(content)
        os.utime(path, ns=(modified, modified))
        return file_fingerprint(path)

    whole = fingerprint(bytes(size))
    assert whole.startswith("sampled:") and fingerprint(bytes(size)) == whole
    assert fingerprint(bytes(size), modified=6) != whole
    assert fingerprint(bytes(size + 1)) != whole
    for place in range(0, size, size // 64):
        assert fingerprint(bytes(place) + b"\1" * 256 + bytes(size - place - 256)) != whole
    assert fingerprint(bytes(size - 1) + b"\1") != whole


def test_changed_added_and_removed_files_are_named_and_new_sources_are_not():
    saved = {"a.jsonl": {"": "1"}, "m": {"x": "1", "y": "2"}, "gone.py": {"": "3"}}
    now = {"a.jsonl": {"": "9"}, "m": {"y": "2", "z": "3"}, "new.py": {"": "4"}}
    with pytest.raises(CheckpointError, match=r"a\.jsonl, m/x, m/z\..*trainer\.resume_changed=accept"):
        check_unchanged(saved, now, ResumeChanged.refuse)
    assert check_unchanged(saved, now, ResumeChanged.accept) == ["a.jsonl", "m/x", "m/z"]
    assert check_unchanged({}, now, ResumeChanged.refuse) == []
