"""Secrets of a configuration stay out of what a run writes down, and a resumed run still knows its settings."""

import json
import threading

import pytest
from rich.console import Console

from hybridflow.elastic.compatibility import check_compatible
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.execute import execute
from hybridflow.launch.prepare import prepare
from hybridflow.observability.redaction import redacted_leaves
from tests.unit.rewards.test_remote import Handler, Server

SETTINGS = [
    "reward.functions=['http://127.0.0.1:9/score?token=s3cr3t-address']",
    "reward.settings.score.headers={Authorization: 's3cr3t-header', Accept: a/b}",
    "reward.settings.score.attempts=2",
    "trainer.experiment=${oc.env:WANDB_API_KEY}",
]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-variable")


def composed(*overrides):
    return compose_run([*SETTINGS, *overrides], config_name="ppo")


def test_they_reach_functions_and_nothing_that_is_written():
    found = composed()
    assert found.config.trainer.experiment == "s3cr3t-variable"
    assert found.config.reward.settings["score"]["headers"]["Authorization"] == "s3cr3t-header"
    text = config_text(found)
    assert "s3cr3t" not in text and "s3cr3t" not in json.dumps(found.redacted(), default=str)
    assert "token=***" in text and "Accept: a/b" in text and "attempts: 2" in text
    assert text.count("# origin: ") > 100


def test_a_resumed_run_compares_what_it_may_know():
    saved = composed().redacted()
    assert check_compatible(redacted_leaves(saved), composed().redacted()) == []
    other_secret = composed("reward.settings.score.headers={Authorization: other, Accept: a/b}")
    assert check_compatible(redacted_leaves(saved), other_secret.redacted()) == []
    changes = check_compatible(
        redacted_leaves(composed().flat()), composed("reward.settings.score.attempts=3").redacted()
    )
    assert [change.key for change in changes] == ["reward.settings.score.attempts"]
    assert "s3cr3t" not in str(changes)


@pytest.fixture
def server():
    found = Server(("127.0.0.1", 0), Handler)
    found.asked = []
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def test_no_file_of_a_run_holds_them_and_it_resumes_with_others(toy_dir, tmp_path, server, capfd):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    run_dir, address = tmp_path / "run", f"http://127.0.0.1:{server.server_port}"

    def run(steps, header):
        words = [
            "algorithm=grpo",
            f"model.path={toy_dir()}",
            f"data.train_files={data}",
            "data={batch_size: 4, max_prompt_tokens: 8, max_response_tokens: 6}",
            "rollout.samples_per_prompt=2",
            f"reward.functions=['{address}/score?token=s3cr3t-address']",
            f"reward.settings.score.headers={{Authorization: {header}}}",
            "trainer.experiment=${oc.env:WANDB_API_KEY}",
            f"trainer={{total_steps: {steps}, save_every: 1, backend: local, device: cpu, threads: 1}}",
            f"trainer.run_dir={run_dir}",
        ]
        return execute(prepare(compose_run(words, config_name="ppo")), Console())

    run(1, "s3cr3t-first")
    assert run(2, "s3cr3t-second").outcome.steps == 2
    assert {headers["Authorization"] for _, _, headers in server.asked} == {"s3cr3t-first", "s3cr3t-second"}
    found = [path for path in run_dir.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert found == []
    shown = capfd.readouterr()
    assert "s3cr3t" not in shown.out + shown.err
    assert {"config.yaml", "run.log", "metrics.jsonl", "report.html"} <= {path.name for path in run_dir.iterdir()}
