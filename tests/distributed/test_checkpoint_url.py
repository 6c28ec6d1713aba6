"""Runs whose checkpoints are copied to a URL, of an S3 server that runs here, and resume from it in a new directory."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.elastic.remote import RemoteCheckpoints
from tests.distributed.runs import metric_rows, reproducible, run_here, small_run

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a bucket; the environment has its server and its credentials.

    The server is a process of its own, because vLLM cannot start where Flask is imported.
    """
    if importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None:
        pytest.skip("needs s3fs and moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = tmp_path_factory.mktemp("s3") / "server.log"
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with pytest.MonkeyPatch.context() as patch, output.open("wb") as log:
        for name, value in settings.items():
            patch.setenv(name, value)
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            create_bucket(settings["AWS_ENDPOINT_URL"], server, output)
            yield f"s3://{BUCKET}"
        finally:
            server.kill()
            server.wait()


def create_bucket(endpoint: str, server: subprocess.Popen[bytes], output: Path) -> None:
    """Creates the bucket once the server answers."""
    until = time.monotonic() + 60
    while True:
        assert server.poll() is None and time.monotonic() < until, output.read_text()
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"))
        except OSError:
            time.sleep(0.1)
        else:
            return


def test_a_run_resumes_from_a_bucket_in_a_new_directory_as_if_it_had_not_been_interrupted(s3: str, tmp_path: Path):
    words, url = [*small_run(tmp_path), "algorithm=ppo"], f"{s3}/runs/first"
    whole = run_here([*words, "trainer.total_steps=6", f"trainer.run_dir={tmp_path}/whole"])
    assert whole.status == 0, whole.said
    words.append(f"trainer.checkpoint_url={url}")
    begun = run_here([*words, "trainer.keep_checkpoints=1", f"trainer.run_dir={tmp_path}/begun"])
    assert begun.status == 0, begun.said
    assert list(RemoteCheckpoints(url).complete()) == [4], "step 2 is not kept"
    words += ["trainer.total_steps=6", f"trainer.run_dir={tmp_path}/resumed"]
    examined = run_here([*words, "--dry-run"])
    assert f"The run resumes from step 4, {url}/step_4." in examined.words and not (tmp_path / "resumed").exists()
    resumed = run_here(words)
    assert resumed.status == 0, resumed.said
    assert list(RemoteCheckpoints(url).complete()) == [4, 6]
    rows = reproducible(metric_rows(tmp_path / "whole"))
    assert reproducible(metric_rows(tmp_path / "resumed")) == [row for row in rows if row["step"] > 4]
    evaluated = run_here([*words, "trainer.total_steps=0", f"trainer.run_dir={tmp_path}/evaluated"])
    assert evaluated.status == 0 and list(RemoteCheckpoints(url).complete()) == [4, 6], evaluated.said
    restarted = run_here([*words, "trainer.resume=never"])
    assert restarted.status == 2 and "has checkpoints of later steps, up to 6" in restarted.words


@pytest.mark.parametrize(
    ("url", "said", "remedy"),
    [
        ("s3://missing/run", "The specified bucket does not exist", "has credentials"),
        ("file:///proc/run", "FileNotFoundError", "Check the path"),
        ("nothing://run", "Protocol not known: nothing", "Use a protocol"),
    ],
)
def test_a_url_that_cannot_be_used_is_an_error_before_anything_starts(
    s3: str, tmp_path: Path, url: str, said: str, remedy: str
):
    words = [*small_run(tmp_path), f"trainer.run_dir={tmp_path}/run", f"trainer.checkpoint_url={url}"]
    for more in ([], ["--dry-run"]):
        ended = run_here([*words, *more])
        assert ended.status == 2 and f"trainer.checkpoint_url={url} cannot be" in ended.words, ended.said
        assert said in ended.words and remedy in ended.words
    assert not (tmp_path / "run").exists()


def test_missing_credentials_are_an_error_before_anything_starts(s3: str, tmp_path: Path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    ended = run_here([*small_run(tmp_path), f"trainer.run_dir={tmp_path}/run", f"trainer.checkpoint_url={s3}/run"])
    assert ended.status == 2 and "Unable to locate credentials" in ended.words
