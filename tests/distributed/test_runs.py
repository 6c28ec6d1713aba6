"""The run directory: everything a run writes, as the tools that read it find it."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.observability.formatting import short
from tests.distributed.runs import Ended, metric_rows, run_well, sample_rows, small_run, steps_of

OF_EVERY_STEP = {
    "actor": ["pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "grad_norm", "lr", "reward_kl_penalty"],
    "critic": ["vf_loss", "vf_clipfrac", "vf_explained_var", "grad_norm", "lr"],
    "critic/score": ["mean", "max", "min"],
    "critic/rewards": ["mean", "max", "min"],
    "critic/advantages": ["mean", "max", "min"],
    "critic/returns": ["mean", "max", "min"],
    "critic/values": ["mean", "max", "min"],
    "response_length": ["mean", "max", "min", "clip_ratio"],
    "prompt_length": ["mean", "max", "min"],
    "timing_s": ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"],
    "timing_s/": ["update_weights", "step"],
    "perf": ["total_num_tokens", "time_per_step", "throughput", "critical_path_seconds", "idle_fraction/main"],
    "training": ["global_step", "epoch", "rollout_probs_diff_max", "rollout_probs_diff_mean"],
    "rewards/exact_match": ["mean"],
}
EVALUATED = "val-core/held_out/acc/mean@1"


@dataclass(frozen=True)
class Finished:
    """A run of four steps of PPO with a reference; its held-out prompts are answered greedily."""

    ended: Ended
    directory: Path

    @property
    def checkpoint(self) -> Path:
        """The last."""
        return self.directory / "checkpoints" / "step_4"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("runs")
    words = [f"trainer={{run_dir: {folder}/run, trackers: [console, jsonl, tensorboard]}}"]
    words += ["algorithm.kl={placement: reward, coefficient: 0.05}", "rollout.eval_sampling.temperature=0"]
    return Finished(run_well([*small_run(folder), *words]), folder / "run")


def test_everything_is_there(finished):
    found = {path.name for path in finished.directory.iterdir()}
    wanted = {"config.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints", "report.html", "tensorboard", "run.log"}
    wanted |= {"ending.json", "trace.json"}
    assert found == wanted
    assert {path.name for path in (finished.directory / "checkpoints").iterdir()} == {"step_2", "step_4"}


def test_the_configuration_says_where_each_value_comes_from(finished):
    text = (finished.directory / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert config["trainer"]["total_steps"] == 4
    assert config["algorithm"]["kl"] == {
        "placement": "reward", "coefficient": 0.05, "estimator": "k1", "allow_k1_loss": False, "target": None,
        "horizon": 10000,
    }  # fmt: skip
    assert re.search(r"^  total_steps: 4  # origin: command line$", text, re.MULTILINE)
    assert re.search(r"^dataflow: ppo  # origin: (file|default)$", text, re.MULTILINE)
    assert re.search(r"^    estimator: k1  # origin: algorithm\.kl\.placement$", text, re.MULTILINE)
    leaves = [line for line in text.splitlines() if re.search(r": \S", line) and not line.lstrip().startswith("- ")]
    assert [line for line in leaves if "# origin: " not in line] == ["command: ppo"]


def test_there_is_one_row_of_metrics_a_step_with_the_names_that_dashboards_know(finished):
    rows = metric_rows(finished.directory)
    assert steps_of(finished.directory) == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        wanted = {f"{group.rstrip('/')}/{name}" for group, names in OF_EVERY_STEP.items() for name in names}
        assert sorted(wanted - set(row)) == []
        assert row["training/global_step"] == row["step"]
        assert all(isinstance(value, int | float) for value in row.values())
    assert [EVALUATED in row for row in rows] == [True, False, True, False, True]
    assert ["timing_s/testing" in row for row in rows[1:]] == [False, True, False, True]
    # The save after step 4 may wait for that after step 2, and shows in the row of step 4 if it does.
    assert ["timing_s/save_checkpoint" in row for row in rows[1:4]] == [False, False, True]


def test_samples_are_what_was_asked_and_answered(finished):
    rows = sample_rows(finished.directory)
    assert {(row["step"], row["split"]) for row in rows} == {
        (0, "eval"), (2, "train"), (2, "eval"), (4, "train"), (4, "eval")
    }  # fmt: skip
    for row in rows:
        known = {"step", "split", "source", "prompt", "response", "tokens", "is_cut_off", "answer", "score", "uid"}
        assert set(row) == known
        assert row["score"] == float(row["response"] == row["answer"])
        assert eval(row["prompt"].rstrip("=")) == int(row["answer"])


def test_plain_transformers_answers_as_the_run_did_at_its_end(finished):
    directory = finished.checkpoint / "actor" / "huggingface"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    held_out = [row for row in sample_rows(finished.directory) if (row["step"], row["split"]) == (4, "eval")]
    assert len(held_out) == 8
    for row in held_out:
        ids = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)
        answer = model.generate(**ids, do_sample=False, max_new_tokens=4)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == row["response"]
    mean = sum(row["score"] for row in held_out) / len(held_out)
    assert metric_rows(finished.directory)[-1][EVALUATED] == pytest.approx(mean)


def test_tensorboard_shows_the_same_numbers(finished):
    events = EventAccumulator(str(finished.directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for row in metric_rows(finished.directory):
        for name, value in row.items():
            if name != "step":
                shown = {event.step: event.value for event in events.Scalars(name)}
                assert shown[int(row["step"])] == pytest.approx(value, rel=1e-6), name  # events hold float32
    assert "samples/eval/text_summary" in events.Tags()["tensors"] or "samples/eval" in events.Tags()["tensors"]


def test_the_report_needs_nothing_but_itself(finished):
    page = (finished.directory / "report.html").read_text()
    loads = (
        r"""(?:\bsrc|\bhref|\baction|data)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?(?:https?:)?//|\bfetch\("""
    )
    assert re.findall(loads, page, re.IGNORECASE) == []
    assert 'rel="stylesheet"' not in page
    for held_out in [row for row in sample_rows(finished.directory) if row["split"] == "eval"][:3]:
        assert held_out["prompt"] in page
    for text in (
        "Curves",
        "Explained variance",
        "Where the time went",
        "Step 4 as a timeline",
        "Configuration",
        "coefficient: 0.05",
    ):
        assert text in re.sub(r"<[^>]+>", "", page), text


def test_the_last_words_say_what_came_of_it_and_where_it_is(finished):
    words = finished.ended.words
    rows = metric_rows(finished.directory)
    assert f"held_out exact match {short(rows[-1][EVALUATED])} from {short(rows[0][EVALUATED])}" in words
    assert f"report {finished.directory}/report.html" in words
    assert f"checkpoint {finished.checkpoint}" in words
    assert f"model {finished.checkpoint}/actor/huggingface" in words
    assert "step 4/4" in words
    assert "eta" in words


def test_the_command_runs_in_any_directory_and_keeps_its_output_apart(tmp_path):
    command = [sys.executable, "-m", "hybridflow.trainer.main_ppo", *small_run(tmp_path), "algorithm=grpo"]
    more = [
        "trainer={experiment: mine, total_steps: 1, save_every: 0}",
        "algorithm.kl.placement=loss",
        "actor.minibatch_size=8",
    ]
    ended = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    row = metric_rows(tmp_path / "runs" / "mine")[-1]
    assert row["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert 0.0 <= row["frac_reward_zero_std"] <= 1.0
    assert "critic/vf_loss" not in row
    assert "report runs/mine/report.html" in " ".join(ended.stderr.split())


def test_a_run_without_a_record_ends_well_and_says_what_is_missing(tmp_path):
    words = [f"trainer={{run_dir: {tmp_path}/run, total_steps: 1, trackers: [console]}}", "algorithm=grpo"]
    ended = run_well([*small_run(tmp_path), *words])
    assert "no report.html will be written: add jsonl to trainer.trackers" in ended.words
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoints",
        "config.yaml",
        "ending.json",
        "run.log",
        "trace.json",
    }
    assert "checkpoint" in ended.words.partition("done 1 step")[2]


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job", "actor.optimizer.learning_rate=5e-7"]])
def test_the_command_explains_itself_without_running(tmp_path, flags):
    command = [sys.executable, "-m", "hybridflow.trainer.main_ppo", *flags]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "learning_rate" in ended.stdout
    assert list(tmp_path.iterdir()) == []
