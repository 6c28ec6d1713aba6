"""The generated reference pages name every setting and every column."""

from docs.reference_pages import columns_page, rewards_page, settings_page
from hybridflow.batch.columns import COLUMNS
from hybridflow.rewards.dialects import DIALECTS
from hybridflow.rewards.factory import BUILT_IN


def section_of_page(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_settings_stand_under_their_section_with_type_range_default_and_meaning():
    optimizer = section_of_page(settings_page(), "actor.optimizer")
    assert "| `learning_rate` | a number from 0 to 1 | `1e-06` | Peak learning rate. |" in optimizer
    assert "| `schedule_steps` | a whole number of 1 or more, or null | `null` |" in optimizer
    assert "| `schedule` | one of: constant, linear, cosine | `constant` |" in optimizer


def test_names_that_the_user_gives_are_marked():
    assert "`devices`" in section_of_page(settings_page(), "placement.pools.NAME")


def test_a_default_stands_with_its_type():
    page = settings_page()
    assert "| `path` | text or null | `null` |" in section_of_page(page, "model")
    assert "| `experiment` | text | `run` |" in section_of_page(page, "trainer")


def test_every_column_is_listed():
    page = columns_page()
    assert all(f"| `{name}` |" in page for name in COLUMNS)


def test_every_reward_function_is_listed_with_its_settings_and_every_dialect_with_its_signature():
    page = rewards_page()
    assert all(f"| `{name}` |" in page for name in BUILT_IN)
    assert "`answer_seconds=5`" in page and "`partial=false`" in page and "`pattern=null`" in page
    assert all(f"`{dialect.signature}`" in page for dialect in DIALECTS)
