"""How a run ended, kept for its report."""

from hybridflow.observability.ending import Ending, forget_ending, read_ending, write_ending


def test_an_error_with_text_that_is_no_text_is_kept_too(tmp_path):
    ending = Ending("failed", "DataError: the file 'caf\udce9.jsonl' is empty")  # a name in Latin-1, as Python reads it
    write_ending(tmp_path, ending)
    assert read_ending(tmp_path) == ending
    forget_ending(tmp_path)
    assert read_ending(tmp_path) is None
