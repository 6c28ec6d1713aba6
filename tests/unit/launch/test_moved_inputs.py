"""A resume from other directories: accepted where they hold the same, refused where anything else has changed."""

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridflow.config.loop import ResumeChanged
from hybridflow.config.user_code import load_member
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.compatibility import Fingerprints, check_unchanged
from hybridflow.errors import CheckpointError
from hybridflow.launch.plan.data import RunData
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.resume import Changes, check_resumable, fingerprints
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import load_tokenizer
from tests.unit.elastic.victim import save
from tests.unit.launch.plans import planned

WORDS = [
    "algorithm=grpo",
    "model.path=policy/model",
    "data={train_files: [first/sums.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}",
]
JUDGE = "import {helper}\n\ndef score(completions, **columns):\n    return [{helper}.SIGN] * len(completions)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with the folders `first`, its copy `same`, and `other`, where each file differs."""
    monkeypatch.chdir(tmp_path)
    for place, sign in (("first", 1), ("other", -1), ("policy", 1)):
        (tmp_path / place / "model").mkdir(parents=True)
        for name in ("sums.jsonl", "chat.jinja", "model/config.json"):
            (tmp_path / place / name).write_text(f'{{"n": {sign}}}')
        for name in ("right.py", "wrong.py"):
            (tmp_path / place / name).write_text(
                f"SIGN = {sign}  # {name}\n\n\ndef loss(logprobs):\n    return logprobs\n"
            )
    shutil.copytree(tmp_path / "first", tmp_path / "same")
    return tmp_path


def with_inputs(words: Sequence[str]) -> tuple[RunPlan, Fingerprints]:
    plan = planned(*WORDS, *words)
    return plan, fingerprints(plan)


def saved(folder: Path, *words: str) -> Checkpoint:
    """A checkpoint that knows the settings and inputs of a run."""
    store, (plan, inputs) = CheckpointStore(folder / "run"), with_inputs(words)
    save(store, 1, config=plan.composed.redacted(), inputs=inputs, streams={})
    return store.open(store.paths()[-1])


def resumed(checkpoint: Checkpoint, *words: str) -> Changes:
    plan, inputs = with_inputs(words)
    tokenizer = load_tokenizer(resolve_model_path("builtin:calculator"), pad_token=None)
    return check_resumable(checkpoint, plan, RunData({}, None, None, tokenizer, {}), inputs)


def refused(checkpoint: Checkpoint, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resumed(checkpoint, *words)
    return caught.value.message


@pytest.mark.parametrize(
    "setting",
    [
        "reward.functions=[{}/right.py:score]",
        "reward.functions=['verl:{}/right.py:score']",
        "reward.functions=[exact_match,{}/right.py:score]",
        "data.filters=[{}/right.py:keep]",
        "data.chat_template={}/chat.jinja",
        "reward.model.path={}/model",
        "algorithm.policy_loss={}/right.py:loss",
        "data.train_files=[{}/sums.jsonl]",
        "actor.model.path={}/model",
        "environment.program='python {}/right.py --port 1'",
        "environment.mcp=['python {}/right.py']",
    ],
)
def test_only_the_same_contents_in_another_directory_resume(setting, folder):
    checkpoint, key = saved(folder, setting.format("first")), setting.partition("=")[0]
    for there in ("same", folder / "same"):
        changes = resumed(checkpoint, setting.format(there))
        assert changes.warnings == []
        (note,) = changes.notes
        assert note.startswith(f"resuming with {key}=") and note.endswith(", with the same contents)")
    assert re.search(rf"written with other (inputs|settings): {key} was ", refused(checkpoint, setting.format("other")))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("reward.functions=[first/right.py:score]", "reward.functions=[same/right.py:other]"),
        ("reward.functions=[first/right.py:score]", "reward.functions=['verl:same/right.py:score']"),
        ("reward.functions=[first/right.py:score]", "reward.functions=[same/wrong.py:score]"),
        ("reward.functions=['http://a/score']", "reward.functions=['http://b/score']"),
        ("reward.functions=['http://a/b/score']", "reward.functions=['http://a/c/score']"),
        (
            "reward={functions: [first/right.py:score, other/right.py:score], weights: [1, 0]}",
            "reward={functions: [other/right.py:score, first/right.py:score], weights: [1, 0]}",
        ),
        ("data.system_prompt='Answer in km/h.'", "data.system_prompt='Be rude. Speed in m/h.'"),
        ("data.system_prompt=first/chat.jinja", "data.system_prompt=same/chat.jinja"),
        ("reward.process=false", "reward.process=true"),
    ],
)
def test_other_names_hosts_order_or_text_are_refused_whatever_the_directory(before, now, folder):
    templates = "data.chat_template={}/chat.jinja"
    checkpoint = saved(folder, before, templates.format("first"))
    key = before.partition("=")[0]
    assert f"written with other inputs: {key}" in refused(checkpoint, now, templates.format("same"))
    changes = resumed(checkpoint, now, templates.format("same"), "trainer.resume_changed=accept")
    assert [words.startswith(f"resuming with {key}") for words in changes.warnings] == [True]


def test_a_copy_of_a_run_is_compared_with_the_files_that_it_reads_there(folder, monkeypatch):
    data = "data={train_files: [sums.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}"

    def taken(copy: str) -> Fingerprints:
        monkeypatch.chdir(folder / copy)
        plan = planned("algorithm=grpo", data, "reward.functions=[right.py:score]")
        assert plan.config.data.train_files == [str(folder / copy / "sums.jsonl")]
        return fingerprints(plan)

    first = taken("first")
    assert {"sums.jsonl", "right.py"} <= first.keys()
    assert check_unchanged(first, taken("same"), ResumeChanged.refuse) == []
    with pytest.raises(
        CheckpointError, match=r"have changed since the checkpoint was written: right\.py, sums\.jsonl\."
    ):
        check_unchanged(first, taken("other"), ResumeChanged.refuse)


def test_changed_modules_of_the_user_are_named_and_other_modules_do_not_count(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "own_helper.py").write_text("SIGN = 1.0\n")
    (folder / "judge.py").write_text(JUDGE.format(helper="own_helper"))
    load_member("judge.py:score", key="reward.functions")
    try:
        checkpoint = saved(folder, "reward.functions=[judge.py:score]")
        assert resumed(checkpoint, "reward.functions=[judge.py:score]") == Changes()
        (folder / "own_helper.py").write_text("SIGN = -1.0\n")
        said = refused(checkpoint, "reward.functions=[judge.py:score]")
    finally:
        del sys.modules["own_helper"]
    assert said.endswith("have changed since the checkpoint was written: module own_helper.")
    known = checkpoint.driver_state()["inputs"]
    assert not [source for source in known if "pytest" in source or "hybridflow" in source]


@contextmanager
def imported_from(place: Path) -> Iterator[None]:
    """`own_package` as it lies in a folder, which is not the current directory nor above it."""
    load_member("own_package.judges.score", key="reward.functions")
    assert Path(vars(sys.modules["own_package"])["__file__"]).is_relative_to(place)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("own_package")]:
            del sys.modules[name]


def test_code_named_by_its_package_is_compared_wherever_the_package_lies(folder, monkeypatch):
    words = ["reward.functions=['trl:own_package.judges.score']", f"model.path={folder}/policy/model"]
    words += [f"data.train_files=[{folder}/first/sums.jsonl]"]
    for place, sign in (("first", 1.0), ("same", 1.0), ("other", -1.0)):
        package = folder / place / "own_package"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "signs.py").write_text(f"SIGN = {sign}\n")
        (package / "judges.py").write_text(JUDGE.format(helper="own_package.signs"))
    monkeypatch.chdir(folder / "policy")
    monkeypatch.syspath_prepend(folder / "first")
    with imported_from(folder / "first"):
        checkpoint = saved(folder, *words)
    monkeypatch.syspath_prepend(folder / "same")
    with imported_from(folder / "same"):
        assert resumed(checkpoint, *words) == Changes()
    monkeypatch.syspath_prepend(folder / "other")
    with imported_from(folder / "other"):
        assert refused(checkpoint, *words).endswith(": module own_package.signs.")


def test_evaluation_data_may_change_in_name_and_content_and_the_log_says_so(folder):
    checkpoint = saved(folder, "data.eval_files=[same/sums.jsonl]")
    (folder / "same/sums.jsonl").write_text("{}")
    changes = resumed(checkpoint, "data.eval_files=[same/sums.jsonl]")
    assert changes.warnings == []
    assert changes.notes == [
        "resuming although 'same/sums.jsonl' of data.eval_files has changed: later evaluations use different rows"
    ]
    notes = resumed(checkpoint, "data.eval_files=[other/sums.jsonl]", "trainer.resume_changed=accept").notes
    assert notes[0].startswith("resuming with data.eval_files=")
    assert not [note for note in notes if "trainer.resume_changed=" in note]
