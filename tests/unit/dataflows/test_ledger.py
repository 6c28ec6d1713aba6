"""The account of groups and tokens of an asynchronous run."""

from hybridflow.dataflows.ledger import REASONS, Ledger
from hybridflow.observability.metrics import plain


def test_all_totals_are_logged_from_the_first_step_on():
    ledger = Ledger()
    first = plain(ledger.metrics({}))
    ledger.discard(7, "stale")
    ledger.count("groups_truncated")
    then = plain(ledger.metrics({}))
    assert first == dict.fromkeys(then, 0)
    assert {f"async/rejected/{reason}" for reason in REASONS} | {"async/groups/truncated"} < first.keys()
    assert {name: value for name, value in then.items() if value} == {
        "async/tokens/generated": 7,
        "async/tokens/discarded": 7,
        "async/groups/discarded": 1,
        "async/groups/truncated": 1,
        "async/rejected/stale": 1,
    }
