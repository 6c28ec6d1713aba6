"""`hybridflow report` and `hybridflow watch`: pages of runs that are going on, were killed, or failed."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from threading import Thread

from hybridflow.cli import report
from hybridflow.cli.main import main
from hybridflow.cli.watch import WatchedPage
from hybridflow.elastic.claim import claim, release
from hybridflow.observability.ending import Ending, write_ending


def logged(run_dir):
    run_dir.mkdir()
    rows = [{"step": step, "critic/score/mean": step / 3} for step in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_a_page_is_written_for_each_run_and_says_how_it_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    running, failed, killed = (logged(tmp_path / name) for name in ("running", "failed", "killed"))
    claim(running)
    write_ending(failed, Ending("failed", "RewardError: <mine> raised. What to do: Mend it."))
    assert main(["report", str(running), str(failed), str(killed)]) == 0
    release(running)
    said = capsys.readouterr().err
    assert str(running / "report.html") in said and str(failed / "report.html") in said
    assert 'class="ending' not in (running / "report.html").read_text()
    assert "<strong>failed</strong> no ending was recorded: the run" in (killed / "report.html").read_text()
    page = (failed / "report.html").read_text()
    assert "<strong>failed</strong> RewardError: &lt;mine&gt; raised. What to do: Mend it." in page


def test_a_directory_without_a_record_is_refused_in_words(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "There is no metrics.jsonl" in said and "Give the directory of a run" in said
    logged(tmp_path / "first")
    for command in ("report", "watch"):
        assert main([command, str(tmp_path)]) == 2
        assert f"Runs in it: {tmp_path / 'first'}." in " ".join(capsys.readouterr().err.split())
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "There is no directory " in capsys.readouterr().err


def test_several_runs_have_a_comparison_and_one_run_goes_where_it_was_asked(tmp_path, monkeypatch, capsys):
    first, second = (logged(tmp_path / name) for name in ("first", "second"))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(first), str(second), str(first)]) == 0
    written = [str(first / "report.html"), str(second / "report.html"), "comparison.html"]
    assert capsys.readouterr().err.split() == written
    page = (tmp_path / "comparison.html").read_text()
    assert "2 runs" in page and "data-refresh" not in page
    (first / "report.html").unlink()
    assert main(["report", str(first), "--output", "one.html"]) == 0
    assert "<h1>first</h1>" in (tmp_path / "one.html").read_text() and not (first / "report.html").exists()
    assert main(["report", str(first), str(second), "-o", "both.html"]) == 0
    assert (tmp_path / "both.html").read_text() == page
    assert main(["report", str(first), "-o", "nowhere/one.html"]) == 2
    assert "--output=nowhere/one.html cannot be written" in capsys.readouterr().err


def test_a_watched_page_is_made_again_only_when_something_has_changed(tmp_path):
    run_dir = logged(tmp_path / "run")
    page = WatchedPage([run_dir, tmp_path / "later"])
    waiting = page()
    assert "Waiting" in waiting and page() is waiting
    logged(tmp_path / "later")
    both = page()
    assert "2 runs" in both and page() is both
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "critic/score/mean": 9.5}\n')
    grown = page()
    assert "9.5" in grown and grown != both and page() is grown
    claim(run_dir)
    running = page()
    assert 'running">running<' in running and page() is running
    release(run_dir)
    write_ending(run_dir, Ending("interrupted", "by hand"))
    assert "by hand" in page()


def test_a_comparison_is_written_again_until_all_runs_have_ended(tmp_path, monkeypatch):
    first, second = (logged(tmp_path / name) for name in ("first", "second"))
    claim(first)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "_SECONDS_APART", 0.05)
    page = tmp_path / "comparison.html"

    def train() -> None:
        while not page.is_file() or "data-refresh" not in page.read_text():
            time.sleep(0.01)
        with (first / "metrics.jsonl").open("a") as file:
            file.write('{"step": 777, "critic/score/mean": 0.5}\n')
        while "777" not in page.read_text():
            time.sleep(0.01)
        release(first)

    training = Thread(target=train, daemon=True)
    training.start()
    assert main(["report", str(first), str(second), "--follow"]) == 0
    training.join(10)
    assert "777" in page.read_text() and "data-refresh" not in page.read_text()


def test_watch_serves_the_page_as_it_is_now_until_ctrl_c_ends_it_in_one_line(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    claim(run_dir)
    command = [sys.executable, "-m", "hybridflow.cli.main", "watch", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stderr
        word, url = watching.stderr.readline().split()[:2]
        assert word == "watching" and url.startswith("http://127.0.0.1:")
        pages = [page_at(url)]
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
        pages.append(page_at(url))
        release(run_dir)
        write_ending(run_dir, Ending("done", "1 step"))
        pages.append(page_at(url))
        watching.send_signal(signal.SIGINT)
        assert watching.stderr.read().strip() == "interrupted"
    assert watching.returncode == 130
    assert ["data-refresh" in page for page in pages] == [True, True, False]
    assert "There is no metrics.jsonl" in pages[0] and "1 step," in pages[1]
    assert sorted(os.listdir(run_dir)) == ["ending.json", "metrics.jsonl"]


def page_at(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_watch_refuses_what_is_no_directory_and_a_port_that_is_none(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "There is no directory" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "99999"]) == 2
    assert "--port=99999 cannot be used" in capsys.readouterr().err
