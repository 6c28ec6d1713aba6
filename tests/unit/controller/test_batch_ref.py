"""Index arithmetic on handles: the same as the plain operation on the batch itself."""

import itertools

import numpy as np
import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import DATA_PARALLEL, BatchRef, ResourcePool, Worker, WorkerGroup, transfer
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.located import Parts, located, pieces, positions_of
from hybridflow.controller.packets import Packet
from hybridflow.controller.tables import Table, Taken, View
from hybridflow.errors import BatchError
from tests.unit.controller.workers import Model, prompts


@pytest.fixture
def generated() -> BatchRef:
    """16 rows over 3 shards, balanced, so that rows of a shard are out of order."""
    return WorkerGroup(Model, ResourcePool("main", 3), LocalBackend(), role="actor").generate(prompts(rows=8))


def same(left: Batch, right: Batch) -> bool:
    tokens = all(
        [row.tolist() for row in left.tokens(name).rows()] == [row.tolist() for row in right.tokens(name).rows()]
        for name in left.token_columns
    )
    rows = all(torch.equal(column, right.row(name)) for name, column in left.row_columns.items())
    return set(left.columns) == set(right.columns) and tokens and rows and left.objects == right.objects


@pytest.mark.parametrize("seed", range(5))
def test_take_then_fetch_is_fetch_then_select(generated, seed):
    index = torch.randint(0, 16, (9,), generator=torch.Generator().manual_seed(seed))
    assert same(generated.take(index).fetch(), generated.fetch().select(index))
    twice = torch.tensor([3, 3, 0])
    assert same(generated.take(index).take(twice).fetch(), generated.fetch().select(index).select(twice))


def test_no_rows_have_the_columns_of_all(generated):
    none = torch.empty(0, dtype=torch.int64)
    empty = generated.take(none)
    assert same(empty.fetch(), generated.fetch().select(none))
    assert same(BatchRef.concat([empty, generated]).fetch(), generated.fetch())
    some = Parts(torch.arange(5), np.array([0, 3, 0, 2, 0]))
    found = located(some, [4, 12])
    assert found.ends.tolist() == [1, 2, 3, 5, 6]
    assert found.counts.tolist() == [0, 3, 0, 1, 1, 0]


def test_a_mask_takes_the_rows_that_are_true(generated):
    mask = generated.tokens_of("response_ids") > generated.tokens_of("response_ids").float().median()
    assert 0 < int(mask.sum()) < 16
    wanted = mask.nonzero().flatten()
    assert same(generated.take(mask).fetch(), generated.fetch().select(wanted))
    assert torch.equal(generated.take(mask).row("uid"), generated.row("uid")[wanted])
    with pytest.raises(BatchError, match=r"mask of shape \[3\] .* batch of 16.*16 in all"):
        generated.take(mask[:3])


def test_numbers_per_row_are_known_without_fetching(generated):
    fetched = generated.fetch()
    assert torch.equal(generated.row("uid"), fetched.row("uid"))
    assert torch.equal(generated.row("weight_version"), fetched.row("weight_version"))
    assert torch.equal(generated.tokens_of("response_ids"), fetched.tokens("response_ids").lengths)
    assert torch.equal(generated.lengths, fetched.tokens("prompt_ids").lengths + fetched.tokens("response_ids").lengths)
    index = torch.tensor([5, 2])
    assert torch.equal(generated.take(index).lengths, generated.lengths[index])
    with pytest.raises(
        BatchError, match=r"no numbers per row for the column 'weigth_version'.*batch\.fetch\("
    ) as caught:
        generated.row("weigth_version")
    assert caught.value.remedy.startswith("Did you mean 'weight_version'? ")


def test_a_later_column_replaces_an_earlier_one(generated):
    ones = Batch.of(rows={"weight_version": torch.ones(16)})
    assert generated.join(ones).fetch(["weight_version"]).row("weight_version").tolist() == [1.0] * 16
    assert generated.join(ones).row("weight_version").tolist() == [1.0] * 16
    assert generated.join(ones).join(generated).row("weight_version").tolist() == [1.0] * 16, "it was there already"
    back = BatchRef.of(ones, generated.backend).join(generated)
    assert back.fetch().row("weight_version").tolist() == [7] * 16


def test_joining_other_rows_or_taking_rows_that_are_not_there_is_an_error(generated):
    with pytest.raises(BatchError, match="in a batch of 16"):
        generated.take([16])
    with pytest.raises(BatchError, match="4 rows cannot be joined to one of 16"):
        generated.join(generated.take([0, 1, 2, 3]).join(prompts(rows=2)))


def test_concat_is_the_rows_end_to_end(generated):
    parts = [generated.take([4, 1]), generated.take([9]), generated.take([0, 2, 3])]
    assert same(BatchRef.concat(parts).fetch(), generated.fetch().select([4, 1, 9, 0, 2, 3]))
    first, second = prompts(rows=2), prompts(rows=3)
    refs = [BatchRef.of(batch, generated.backend).take([1, 0]) for batch in (first, second)]
    expected = Batch.concat([first.select([1, 0]), second.select([1, 0])])
    assert same(BatchRef.concat(refs).fetch(), expected)


def test_fetch_brings_only_the_columns_asked_for(generated):
    assert generated.fetch(["answer", "uid"]).columns == ["uid", "answer"]
    with pytest.raises(BatchError, match="'fetch' needs the columns \\['scores'\\]"):
        generated.fetch(["scores"])


def test_meta_of_stages_and_of_the_driver_travels(generated):
    assert generated.meta == {"temperature": 0.5}
    assert generated.with_meta(tokens=12).fetch(["uid"]).meta == {"temperature": 0.5, "tokens": 12}


@pytest.mark.parametrize("sizes", [[3], [2, 3], [1, 0, 4, 2]])
def test_every_row_is_located_in_order(sizes):
    shards = [[f"{shard}.{row}" for row in range(size)] for shard, size in enumerate(sizes)]
    flat = list(itertools.chain(*shards))
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.arange(len(flat)),
        torch.empty(0, dtype=torch.int64),
        torch.arange(1, len(flat)),
        torch.arange(4) % 2,
    ]
    parts += [torch.arange(len(flat)).flip(0), torch.arange(len(flat)).repeat(2)]
    parts += [torch.arange(len(flat)).repeat_interleave(3), torch.tensor([0, 0, 0, 1, 1]) % len(flat)]
    parts += [torch.randint(0, len(flat), (count,), generator=generator) for count in (1, 2, 5, 20)]
    found = located(Parts(torch.cat(parts), np.array([len(part) for part in parts])), sizes)
    widths = np.arange(len(sizes)) % 3 + 1
    objects = [number for number, width in enumerate(widths.tolist()) for _ in range(width)]
    instructions, read, ends = found.instructions(widths, np.full(len(parts), 7))
    for part, runs, own, order in zip(parts, instructions, np.split(read, ends[:-1]), found.orders, strict=True):
        stored = [*range(7), *(objects[place] for place in own)]
        taken: list[str] = []
        for slots, rows in pieces(runs):
            [number] = {stored[slot] for slot in slots}
            assert len(slots) == widths[number]
            whole = shards[number]
            if isinstance(rows, np.ndarray):
                taken += [whole[row] for row in rows]
            else:
                taken += whole if rows is None else whole[rows[0] : rows[1]]
        positions = range(len(part)) if order is None else positions_of(order)
        assert [taken[position] for position in positions] == [flat[row] for row in part.tolist()]


@pytest.mark.parametrize("times", [1, 4])
def test_the_samples_of_a_prompt_share_its_row(times):
    class Counting(LocalBackend):
        num_rows = 0

        def put(self, value: object) -> object:
            assert isinstance(value, Packet)
            self.num_rows += len(value.columns.get("prompt_ids", ()))
            return super().put(value)

    batch, backend = prompts(rows=5, siblings=1), Counting()
    rows = torch.tensor([3, 0, 4, 4, 1])
    ref = BatchRef.of(batch.repeat(times), backend)
    assert same(ref.fetch(), Batch(batch.repeat(times).by_name))
    assert same(ref.take(rows).fetch(), batch.repeat(times).select(rows))
    assert backend.num_rows == len(batch)
    again = BatchRef.of(batch.repeat(2).repeat(times), backend).fetch()
    assert again.row("sample_index").tolist() == [*range(times)] * 10, "samples are numbered again"


def test_repeated_rows_can_be_concatenated_with_others():
    backend = LocalBackend()
    actor = WorkerGroup(Model, ResourcePool("main", 2), backend, role="actor")
    repeated = prompts(rows=4, siblings=1).repeat(2)
    repeated.meta["k"] = 1
    plain = repeated.select(torch.arange(2, 6))
    first, second = actor.generate(repeated), actor.generate(plain)
    mixed = BatchRef.concat([first.take([7, 0]), second, BatchRef.concat([first, first.take([3])])])
    parts = [first.fetch().select([7, 0]), second.fetch(), first.fetch(), first.fetch().select([3])]
    assert same(mixed.fetch(), Batch.concat(parts)) and mixed.meta["k"] == 1
    restored = BatchRef.of_stages(first.stages(), backend)
    assert [declared for declared, _ in first.stages()] == [declared for declared, _ in second.stages()]
    assert same(BatchRef.concat([restored, first]).fetch(), Batch.concat([first.fetch(), first.fetch()]))
    assert "answer" not in first.without(["answer", "sample_index"]).fetch().columns


def test_object_columns_and_empty_rows_survive():
    batch = Batch.of(
        tokens={"prompt_ids": Ragged.from_rows([[], [1, 2], []], dtype=torch.int64)},
        objects={"answer": [None, {"a": 1}, "x"]},
    )
    ref = BatchRef.of(batch, LocalBackend()).take([2, 1])
    assert ref.fetch().object("answer") == ["x", {"a": 1}]
    assert ref.lengths.tolist() == [0, 2]


def test_metrics_that_a_later_stage_passes_on_count_once():
    first, second = (Batch.of(rows={name: torch.zeros(2)}, meta={"m/a": 1.0}) for name in ("x", "y"))
    assert BatchRef.of(first, LocalBackend()).join(second).metrics_by_shard("m/") == {"m/a": [(1.0, 2)]}


def test_a_call_waits_only_for_the_stages_that_may_have_its_columns(generated):
    class Slow:
        """A stage that has not answered."""

        def __init__(self) -> None:
            self.packet = Packet({}, {})
            self.number = 99

    scored = BatchRef(
        [*generated._views, View(Table.of_answers([Slow()], ("scores",), [16], generated.backend))], generated.backend
    )
    for wanted, expected in (
        (("prompt_ids", "response_ids"), False),
        (("response_ids", "scores"), True),
        (("response_ids", "sum_pi_squared"), False),
        (("response_ids", "filter_scores"), True),
        (("response_ids", "own"), True),
        (None, True),
    ):  # fmt: skip  (sum_pi_squared has another producer, and who adds a column of a user's own is unknown)
        taken = Taken.by(1)
        scored.portion(None, taken, wanted=wanted)
        assert (99 in taken.calls) is expected, wanted


def test_companions_are_not_part_of_a_batch(generated):
    other = BatchRef.of(prompts(rows=2), generated.backend)
    both = generated.with_companions(greedy=other)
    assert both.companions == {"greedy": other} and len(both) == len(generated)
    assert not both.take([0]).companions and not both.join(Batch.of(rows={"x": torch.zeros(16)})).companions
    assert same(both.fetch(), generated.fetch())


def test_a_batch_of_its_stages_is_the_batch(generated):
    again = BatchRef.of_stages(generated.stages(), generated.backend)
    assert same(again.fetch(), generated.fetch()) and again.meta == generated.meta
    assert set(again.declared) == set(generated.declared)
    assert BatchRef.concat([generated, again]).fetch(["uid"]).row("uid").tolist() == 2 * generated.row("uid").tolist()


def test_metadata_of_a_restored_batch_is_there_before_the_other_batch_is_known():
    group = WorkerGroup(ChangesMore, ResourcePool("own", 2), LocalBackend(), role="own")
    given = Batch.of(rows={"uid": torch.arange(4), "margin": torch.arange(4)})
    first, second = (group.add(given.with_columns(meta={name: 1.0})) for name in ("first", "second"))
    both = BatchRef.concat([BatchRef.of_stages(first.stages(), first.backend), second])
    assert both.fetch().meta == both.result().fetch().meta == {"first": 1.0, "second": 1.0}


def test_columns_that_share_a_packet_can_be_left_out_or_replaced(generated):
    """A rank returns the columns that its stage provides in one packet, of which a reader takes some."""
    fetched = generated.fetch()
    kept = generated.without(["response_ids"])
    assert set(kept.fetch().columns) == set(fetched.columns) - {"response_ids"}
    assert kept.fetch().meta == kept.meta == {}
    assert same(BatchRef.concat([kept, kept]).fetch(), Batch.concat([kept.fetch(), kept.fetch()]))
    with pytest.raises(BatchError, match="needs the columns \\['response_ids'\\]"):
        kept.fetch(["response_ids"])
    newer = Batch.of(rows={"weight_version": fetched.row("weight_version") + 7})
    replaced = generated.join(newer)
    assert torch.equal(replaced.fetch().row("weight_version"), newer.row("weight_version"))
    newer_first = BatchRef.of(newer, generated.backend).join(generated)
    assert torch.equal(newer_first.fetch().row("weight_version"), fetched.row("weight_version"))


class Declares(Worker):
    """Two stages with the same columns, of which one declares fewer."""

    @transfer(DATA_PARALLEL, requires=("uid",), provides=("a",), keeps_rows=False)
    def one(self, batch: Batch) -> Batch:
        return self.two(batch)

    @transfer(DATA_PARALLEL, requires=("uid",), provides=("a", "b"), keeps_rows=False)
    def two(self, batch: Batch) -> Batch:
        return batch.with_columns(rows={"b": batch.row("uid") * 2, "a": batch.row("uid") + 1})


def test_no_column_of_concatenated_stages_is_lost():
    """One stage declares a column that the other returns too."""
    group = WorkerGroup(Declares, ResourcePool("own", 2), LocalBackend(), role="own")
    batch = Batch.of(rows={"uid": torch.arange(4)})
    both = BatchRef.concat([group.one(batch), group.two(batch)])
    assert both.fetch().row("b").tolist() == both.row("b").tolist() == 2 * [0, 2, 4, 6]
    assert both.fetch(["a"]).row("a").tolist() == 2 * [1, 2, 3, 4]


class ChangesMore(Worker):
    """Adds `a`, and changes a column that another stage declares."""

    @transfer(DATA_PARALLEL, requires=("uid", "margin"), provides=("a",))
    def add(self, batch: Batch) -> Batch:
        return batch.with_columns(rows={"a": batch.row("uid") + 1, "margin": batch.row("margin") + 100})


def test_a_column_that_a_stage_changes_is_read_with_those_that_it_declares():
    """As environments change the prompt; whether or not the driver has read the answer."""
    group = WorkerGroup(ChangesMore, ResourcePool("own", 2), LocalBackend(), role="own")
    given = Batch.of(rows={"uid": torch.arange(4), "margin": torch.arange(4)})
    batch = group.add(given)
    assert not batch.settled
    before = [batch.fetch(columns) for columns in (["margin", "a"], None)]
    after = [batch.result().fetch(columns) for columns in (["margin", "a"], None)]
    assert batch.settled and all(map(same, before, after))
    assert before[0].row("margin").tolist() == before[1].row("margin").tolist() == [100, 101, 102, 103]


def test_what_was_removed_from_one_batch_is_not_in_its_concatenation_with_another(generated):
    kept = generated.without(["rollout_logprobs"])
    for parts in ([kept, generated], [generated, kept]):
        both = BatchRef.concat(parts)
        fetched = both.fetch()
        assert set(both.columns) == set(fetched.columns) == set(kept.columns)
        assert both.meta == fetched.meta == {}
        assert fetched.row("uid").tolist() == 2 * kept.row("uid").tolist()


def test_shards_that_no_part_reads_are_not_stored():
    class Counting(LocalBackend):
        puts = 0

        def put(self, value):
            self.puts += 1
            return super().put(value)

    backend = Counting()
    whole = BatchRef.concat([BatchRef.of(prompts(rows=2), backend) for _ in range(4)])
    assert whole.take([0]).fetch(["uid"]).row("uid").tolist() == [100] and backend.puts == 1
