"""Log records: one plain line an event."""

import logging
import sys
from io import StringIO

import pytest

from hybridflow.errors import ResourceError
from hybridflow.observability.logs import configure_logging


def test_an_event_is_one_line_on_stderr_and_in_the_run_log_however_often_they_are_configured(tmp_path, monkeypatch):
    configure_logging(tmp_path)
    configure_logging(tmp_path)
    monkeypatch.setattr(sys, "stderr", replaced := StringIO())
    logging.getLogger("hybridflow.data").info("prompts=%d dropped=%d", 10, 2)
    assert replaced.getvalue().endswith("INFO    prompts=10 dropped=2\n")
    assert "INFO    hybridflow.data prompts=10 dropped=2" in (tmp_path / "run.log").read_text()
    assert replaced.getvalue().count("prompts") == (tmp_path / "run.log").read_text().count("prompts") == 1


def test_the_run_log_begins_with_what_was_said_before_it_was_there(tmp_path):
    configure_logging(None)
    logging.getLogger("hybridflow.data").warning("rows=%d", 3)
    try:
        raise ValueError("traced")
    except ValueError:
        logging.getLogger("hybridflow.data").exception("odd")
    configure_logging(tmp_path)
    logging.getLogger("hybridflow.data").info("later")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0].endswith("WARNING hybridflow.data rows=3")
    assert "ValueError: traced" in lines
    assert lines[-1].endswith("INFO    hybridflow.data later")
    configure_logging(None)
    configure_logging(tmp_path / "next")
    assert (tmp_path / "next" / "run.log").read_text() == ""


def test_other_ranks_and_other_packages_say_warnings_only(capsys):
    configure_logging(None, rank=3)
    logging.getLogger("hybridflow").info("quiet")
    logging.getLogger("somelib").info("quiet")
    logging.getLogger("hybridflow").warning("loud")
    written = capsys.readouterr().err
    assert "quiet" not in written
    assert "rank=3 loud" in written


def test_a_run_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be written.*trainer\.run_dir"):
        configure_logging(tmp_path / "file" / "run")


def test_a_full_disk_under_the_run_log_is_said_once(tmp_path, capsys):
    (tmp_path / "run.log").symlink_to("/dev/full")
    configure_logging(tmp_path)
    for _ in range(3):
        logging.getLogger("hybridflow").info("event")
    written = capsys.readouterr().err
    assert written.count("no longer written") == 1
    assert written.count("INFO    event") == 3
