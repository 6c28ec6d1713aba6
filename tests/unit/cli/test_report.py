"""`hybridflow report`: the page of runs that are going on, were killed, or failed."""

import json

from hybridflow.cli.main import main
from hybridflow.elastic.claim import claim, release
from hybridflow.observability.ending import Ending, write_ending


def logged(run_dir):
    run_dir.mkdir()
    rows = [{"step": step, "critic/score/mean": step / 3} for step in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_a_page_is_written_for_each_run_and_says_how_it_ended(tmp_path, capsys):
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
