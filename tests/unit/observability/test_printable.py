"""Texts of others do not act on a terminal or a page."""

import io
import logging

import pytest
from rich.table import Table
from rich.text import Text

from hybridflow.errors import DataError
from hybridflow.launch.messages import say_failure
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.printable import PlainConsole, printable
from hybridflow.observability.report import write_report

EVIL = "a\x1b]0;pwned\x07\x1b[31mRED\x1b[2J\x9b1m\u202egpj\u2066\r"


def acts(text):
    return [each for each in text if each in "\x1b\x07\x9b\u202e\u2066\r"]


def test_no_text_reaches_a_console_raw():
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, color_system=None, width=200)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL, "red"))
    console.print(EVIL, Text(EVIL), table, markup=False)
    say_failure(console, DataError(f"Line 1 is {EVIL}.", remedy=EVIL))
    assert printable("a\x1b[31m\u202eb\n\tc") == "a\\x1b[31m\\u202eb\n\tc"
    assert "pwned" in file.getvalue()
    assert acts(file.getvalue()) == []


@pytest.fixture
def run_log(tmp_path, capsys):
    configure_logging(tmp_path)
    yield tmp_path / "run.log"
    configure_logging(None)


def test_log_lines_and_tracebacks_are_plain_and_tell_no_secrets(run_log, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cr3t-token")
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("hybridflow").exception("%s at http://u:pw@host with s3cr3t-token", EVIL)
    for text in (run_log.read_text(), capsys.readouterr().err):
        assert text.count("pwned") == 2 and acts(text) == []
        assert "s3cr3t" not in text and "http://***@host" in text


def test_the_report_is_plain(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "val-core/a\\u001b[31m\\u202e/mean": 1.0, "\\u001b[2J": 2}\n'
        '{"step": 2, "val-core/a\\u001b[31m\\u202e/mean": 2.0, "\\u001b[2J": 3}\n'
    )
    (tmp_path / "config.yaml").write_text(
        f"a: '{EVIL}'  # origin: {EVIL}\nb: http://u:s3cr3t@host  # origin: x\n", newline=""
    )
    page = write_report(tmp_path).read_text()
    assert acts(page) == [] and "s3cr3t" not in page
