"""Texts of settings are read back from the YAML that hybridflow writes."""

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridflow.cli.main import main
from hybridflow.config.section import leaves
from hybridflow.launch.compose.files import file_content
from hybridflow.launch.compose.yaml_text import yaml_text

TEXTS = st.text() | st.text("0123456789.eE+-_:xinfaNyY~") | st.text(" \n\t\r'\"\\#&*!|>{}[],?:-%@`\x85\u2028é")
VALUES = st.recursive(TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("yaml") / "run.yaml"


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=3))
@example({"a": ["1e3", "1E+3", "1_0e2", ".5e3", "+.inf", ".nan", "y", "no", "1:30", "2020-01-01", "0o7", "", "~"]})
@example({"a": "${oc.env:HOME}", "b": "${", "c": "???", "1e3": "<<", "d": "a\n  b\n", "e": "\n x", "f": "\x85\n"})
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_back_equal(file, content):
    for has_blocks in (False, True):
        text = yaml_text(content, has_blocks=has_blocks)
        file.write_text(text, encoding="utf-8")
        assert file_content(file) == content and yaml.safe_load(text) == content
    assert len(yaml_text({"a": str(content)}).splitlines()) == 1


def test_texts_that_look_like_numbers_stay_texts_wherever_they_are_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop = "rollout.sampling.stop=['1e3']"
    capsys.readouterr()
    assert main(["ppo", "task=calculator", stop, "--cfg", "job"]) == 0
    (tmp_path / "job.yaml").write_text(capsys.readouterr().out)
    place = ["--on", "kuberay", "--image", "i", "--mount", "c:/s", "ppo", "task=calculator", stop]
    assert main(["launch", "--dry-run", *place, "trainer.run_dir=/s/r", "trainer.devices=1"]) == 0
    pod = yaml.safe_load(capsys.readouterr().out)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    (tmp_path / "launched.yaml").write_text(pod["metadata"]["annotations"]["hybridflow/run.yaml"])
    assert main(["plan", "ppo", "task=calculator", stop, "--on", "2xcpu", "--save", "planned.yaml"]) == 0
    theirs = "verl.trainer.main_ppo actor_rollout_ref.model.path=a data.train_files=[1e3] trainer.experiment_name=1e3"
    assert main(["translate", "--save", "translated.yaml", f"python -m {theirs}"]) == 0
    for name in ("job", "launched", "planned"):
        content = file_content(tmp_path / f"{name}.yaml")
        assert dict(leaves(content))["rollout.sampling.stop"] == ["1e3"], name
    translated = file_content(tmp_path / "translated.yaml")
    assert translated["trainer.experiment"] == "1e3" and translated["data.train_files"] == ["1e3"]
