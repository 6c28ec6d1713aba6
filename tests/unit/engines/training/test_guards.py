"""Guards of optimizer steps: what they find, what they do about it, and that a skipped step changes nothing."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.config.guards import GuardAction, Guards, Limit
from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.guards import StepGuards
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.engines.training.state_files import FIRST_MOMENT, SECOND_MOMENT
from hybridflow.errors import NumericError
from hybridflow.observability.metrics import maximum, mean, total
from hybridflow.parallel.groups import Ranks
from tests.parity.divided import Case, copies, engine_of, global_batch, loss_of, mesh_of, on, own_rows
from tests.spmd import preload, run_ranks
from tests.toys import sequences, stepped
from tests.unit.engines.training.engines import language_engine, likelihood_loss, summed

preload("hybridflow.engines.training.megatron.engine")

SKIP, FAULT, WARN = GuardAction.skip, GuardAction.fault, GuardAction.warn
NUMBERS = {"actor/pg_loss": total(2.0), "actor/ppo_kl": mean(0.5, 4.0), "actor/ratio_max": maximum(8.0)}


def limited(name: str, above: float, action: GuardAction) -> Guards:
    """Guards with one limit."""
    guards = Guards()
    setattr(guards, name, Limit(above, action))
    return guards


def state(engine) -> list[Tensor]:
    """All that an optimizer step changes on a rank, in memory of its own."""
    stepped_tensors = [*engine._stepped_tensors()]
    moments = [each.state[k] for each in stepped_tensors for k in (FIRST_MOMENT, SECOND_MOMENT) if k in each.state]
    own = [each.tensor for each in stepped_tensors if each.is_copy]
    return [shard.tensor for shard in copies(engine)] + [tensor.detach().clone() for tensor in moments + own]


def is_same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _silent_nan(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
    """A loss of NaN whose gradient is finite."""
    return Loss(outputs["logprobs"].sum(), {"actor/pg_loss": total(float("nan"))})


@pytest.mark.parametrize("loss", [summed(times=torch.nan), LossFn(("logprobs",), _silent_nan)], ids=["norm", "loss"])
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_skipped_step_leaves_one_device_as_it_was(toy_dir, loss, dtype):
    engine = language_engine(toy_dir(), dtype=dtype, guards=Guards(non_finite=SKIP))
    untouched = language_engine(toy_dir(), dtype=dtype)
    for each in (engine, untouched):
        stepped(each, sequences(seed=1), likelihood_loss)
    before = state(engine)
    metrics = stepped(engine, sequences(seed=2), loss)
    assert metrics["guards/skipped_updates"].value == 1.0 and engine.steps == 1
    assert is_same(state(engine), before)
    for each in (engine, untouched):
        stepped(each, sequences(seed=3), likelihood_loss)
    assert is_same(state(engine), state(untouched))


def skipped(rank: int, case: Case) -> tuple[list[float], bool, bool]:
    """The metric of a step whose loss is NaN on one rank, and whether it and the step after it change nothing more."""
    engine, mesh = engine_of(case, rank), mesh_of(case)
    untouched = engine_of(replace(case, settings={}), rank)

    def step(each, seed: int) -> None:
        batch = global_batch(seed, "language")
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        stepped(each, rows, loss_of(batch, "language"))

    for each in (engine, untouched):
        step(each, 0)
    before, batch = state(engine), global_batch(1, "language")
    share = len(batch) // mesh.axis_size("data")
    first = share * mesh.index_along(rank, ("data",))
    metrics = stepped(engine, batch.slice(first, first + share), summed(times=torch.nan if rank == 1 else 1.0))
    is_kept = is_same(state(engine), before)
    for each in (engine, untouched):
        step(each, 2)
    return [metrics["guards/skipped_updates"].value], is_kept, is_same(state(engine), state(untouched))


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [on("fsdp", {}), on("fsdp", {"replicas": 2}), on("megatron", {}), on("megatron", {"pipeline": 2})],
)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one_and_nothing_changes(toy_dir, engine, sizes):
    layers = {"num_hidden_layers": 4} if engine == "megatron" else {}
    directory = toy_dir("llama", num_attention_heads=4, num_key_value_heads=2, **layers)
    case = Case(directory, 2, TrainingEngine[engine], sizes, "language", settings={"guards": Guards(non_finite=SKIP)})
    assert run_ranks(skipped, 2, case) == [([1.0], True, True)] * 2


def flipped(rank: int, case: Case) -> list[object]:
    """The findings of a rank with equal replicas, and after one bit of a weight on rank 1 has flipped."""
    engine, mesh = engine_of(case, rank), mesh_of(case)
    found: list[object] = []
    for seed in range(2):
        if seed and rank == 1:
            shard = next(shard for shard in engine.weight_shards() if shard.name.endswith("norm.weight"))
            shard.tensor.data.view(torch.int32)[0] ^= 1
        batch = global_batch(seed, "language")
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        try:
            found.append(stepped(engine, rows, loss_of(batch, "language"))["guards/replicas_differ"].value)
        except NumericError as error:
            found.append(error.message)
    return found


@pytest.mark.parametrize("action", [WARN, FAULT])
@pytest.mark.parametrize(("engine", "sizes"), [on("fsdp", {"replicas": 2}), on("megatron", {})])
def test_replicas_that_differ_by_a_bit_are_found_on_all_ranks(toy_dir, engine, sizes, action):
    directory = toy_dir("llama", num_attention_heads=4, num_key_value_heads=2)
    guards: dict[str, object] = {"guards": Guards(replicas_every=1, replicas=action)}
    case = Case(directory, 2, TrainingEngine[engine], sizes, "language", settings=guards)
    for before, after in run_ranks(flipped, 2, case):
        assert before == 0.0
        if action is WARN:
            assert after == 1.0
        else:
            assert "Data-parallel replicas hold different values of the weight 'model." in str(after)


@pytest.mark.parametrize(
    ("name", "value", "title"),
    [
        ("grad_norm", 3.0, "The gradient's norm is 3"),
        ("loss", 2.0, "The loss is 2"),
        ("kl", 0.5, "The KL divergence from the policy before the update is 0.5"),
        ("ratio", 8.0, "The largest probability ratio is 8"),
    ],
)
def test_each_limit_acts_above_it_only(name, value, title, caplog):
    for action in GuardAction:
        metrics = dict(NUMBERS)
        guards = StepGuards(limited(name, value, action), Ranks.alone())
        assert guards.admit(7, 3.0, metrics)
        assert metrics["guards/exceeded"].value == 0.0
        guards = StepGuards(limited(name, value / 2, action), Ranks.alone())
        if action is FAULT:
            with pytest.raises(NumericError, match=rf"{title}, above {value / 2:g} at optimizer step 7"):
                guards.admit(7, 3.0, metrics)
            continue
        assert guards.admit(7, 3.0, metrics) == (action is WARN)
        assert metrics["guards/exceeded"].value == 1.0
        assert f"(guards.{name})" in caplog.text and title in caplog.text


def test_the_most_severe_action_counts_and_warnings_end(caplog):
    guards = StepGuards(Guards(loss=Limit(1.0, WARN), kl=Limit(0.1, SKIP)), Ranks.alone())
    for step in range(6):
        assert not guards.admit(step, 1.0, dict(NUMBERS))
    assert caplog.text.count("the step is not taken") == 3
    assert caplog.text.count("Further ones are only counted") == 1
