"""`@transfer` attaches a spec, and misuse is reported at once."""

import pytest

from hybridflow.batch import Batch
from hybridflow.controller import BROADCAST, DATA_PARALLEL, ResourcePool, Worker, WorkerGroup, transfer
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.transfer import specs_of
from hybridflow.errors import ConfigError
from tests.unit.controller.workers import Model


def test_the_spec_says_what_travels():
    specs = specs_of(Model)
    requires = ("prompt_ids", "response_ids")
    assert specs["values"].columns_of(0) == ((*requires, "bonus"), requires)
    assert specs["values"].provides == ("values",)
    assert specs["columns_seen"].columns_of(0) == (None, ())
    assert specs["both"].columns_of(1) == (("uid",), ("uid",))


def test_an_overriding_method_keeps_the_spec_of_the_one_it_overrides():
    class Other(Model):
        def values(self, batch: Batch) -> Batch:
            return batch

    assert specs_of(Other)["values"] == specs_of(Model)["values"]


def test_a_generator_and_a_batch_without_provided_columns_are_refused():
    def stream(self):
        yield 1

    def values(self, batch: Batch) -> Batch:
        return batch

    with pytest.raises(ConfigError, match=r"generator.*Return the whole result"):
        transfer(BROADCAST)(stream)
    with pytest.raises(ConfigError, match=r"returns a Batch.*provides"):
        transfer(DATA_PARALLEL)(values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocol": DATA_PARALLEL, "requires": "prompt_ids"}, r"requires='prompt_ids'.*tuple"),
        ({"protocol": "broadcast"}, r"'broadcast'.*not a transfer protocol.*DATA_PARALLEL"),
    ],
)
def test_other_protocols_and_columns_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        transfer(**given)


def test_a_method_named_like_one_of_the_group_is_refused():
    class Clash(Worker):
        @transfer(BROADCAST)
        def kill(self) -> None: ...

    with pytest.raises(ConfigError, match=r"\['kill'\].*Rename"):
        WorkerGroup(Clash, ResourcePool("main", 1), LocalBackend(), role="actor")


def test_a_pool_needs_a_device():
    with pytest.raises(ConfigError, match="'main' has 0 devices"):
        ResourcePool("main", 0)
