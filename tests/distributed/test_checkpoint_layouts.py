"""Checkpoints of one engine and layout, taken over by others: nothing is lost on the way, and training goes on."""

import os
import pickle
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora, TrainingEngine
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.manifest import Parts
from hybridflow.engines.training.state_files import load_state
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.parallel.file_records import files_below
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from tests.parity.divided import (
    BFLOAT16_TOLERANCE,
    TOLERANCE,
    Case,
    Trained,
    assert_equal,
    engine_of,
    global_batch,
    largest_differences,
    loss_of,
    mesh_of,
    own_rows,
    train,
    train_rank,
)
from tests.spmd import preload, run_ranks
from tests.toys import stepped
from tests.unit.elastic.victim import written_by

preload("hybridflow.engines.training.megatron.engine")

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}

Layout = tuple[TrainingEngine, int, dict[str, object]]
SINGLE: Layout = (TrainingEngine.single, 1, {})


def fsdp(ranks: int, **sizes: object) -> Layout:
    return TrainingEngine.fsdp, ranks, sizes


def megatron(ranks: int, **sizes: object) -> Layout:
    return TrainingEngine.megatron, ranks, sizes


def laid_out(case: Case, layout: Layout, **changes: object) -> Case:
    engine, ranks, sizes = layout
    return replace(case, engine=engine, ranks=ranks, sizes=sizes, **changes)


def case_of(toy_dir, architecture: str, **settings: object) -> Case:
    directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", vocab_size=70, **SIZES)
    return Case(directory, **settings)


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds of an optimizer, whole, by kind and weight."""
    saved = saved_shapes(checkpoint / "optimizer")
    tensors = {key: torch.full(shape, torch.nan) for key, shape in saved.items()}
    shards = [(key.partition(".")[0], WeightShard.full(key.partition(".")[2], t)) for key, t in tensors.items()]
    return tensors | {"steps": torch.tensor(load_state(checkpoint, shards, Ranks.alone()))}


def assert_same_checkpoint(one: Path, other: Path) -> None:
    names = {path.name for path in (one / "huggingface").iterdir()}
    assert names == {path.name for path in (other / "huggingface").iterdir()}
    for name in names:
        same = (one / "huggingface" / name).read_bytes() == (other / "huggingface" / name).read_bytes()
        assert same, f"{name} of {other} differs"
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), f"{key} of {other} differs"


@pytest.mark.parametrize(
    ("architecture", "settings", "layouts"),
    [
        ("qwen3", {}, [megatron(2, tensor=2), fsdp(3), SINGLE]),
        ("llama", {"dtype": Dtype.bfloat16}, [fsdp(2), megatron(2)]),
        ("qwen3_moe", {"kind": "value"}, [SINGLE, megatron(2, expert=2)]),
        pytest.param(
            "qwen3",
            {"kind": "value"},
            [
                megatron(4, tensor=2, pipeline=2),
                fsdp(4, tensor=2),
                megatron(2, pipeline=2, virtual_pipeline=2),
                fsdp(3),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_moe",
            {},
            [megatron(4, expert=2, pipeline=2), fsdp(3), megatron(2, tensor=2, sequence_parallel=True), SINGLE],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen2",
            {"dtype": Dtype.bfloat16},
            [SINGLE, megatron(4, tensor=2), megatron(4, pipeline=2, distributed_optimizer=False), fsdp(4, replicas=2)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_handed_from_engine_to_engine_stays_the_same_to_the_last_bit(
    toy_dir, tmp_path, architecture, settings, layouts
):
    case = case_of(toy_dir, architecture, **settings)
    train(laid_out(case, layouts[0], steps=2, save_to=tmp_path / "0"))
    assert any(key.startswith("exp_avg_sq.") for key in state_of(tmp_path / "0"))
    for number, layout in enumerate(layouts[1:], start=1):
        before, after = tmp_path / str(number - 1), tmp_path / str(number)
        train(laid_out(case, layout, steps=0, resume_from=before, save_to=after))
        assert_same_checkpoint(tmp_path / "0", after)


def last_steps(trained: Trained) -> Trained:
    """The part of five steps that a training resumed after the second also has."""
    return Trained(trained.losses[2:], trained.norms[2:], trained.outputs[2:], trained.weights)


BFLOAT16, VALUE = {"dtype": Dtype.bfloat16}, {"kind": "value"}


@pytest.mark.parametrize(
    ("architecture", "settings", "first", "second"),
    [
        ("qwen3", {}, megatron(2, pipeline=2), fsdp(2, tensor=2)),
        ("qwen3", {}, SINGLE, megatron(2, tensor=2)),
        ("qwen3_moe", VALUE, fsdp(2), SINGLE),
        ("qwen3", BFLOAT16, megatron(2), megatron(2, tensor=2)),
    ]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("qwen2", {}, fsdp(2), megatron(2, tensor=2)),
            ("qwen3", {}, SINGLE, fsdp(4, tensor=2)),
            ("qwen3", {}, fsdp(4, tensor=2, sequence=2), fsdp(3)),
            ("qwen3", {}, fsdp(3), megatron(4, pipeline=2)),
            ("qwen3", {}, megatron(4, tensor=2, pipeline=2), SINGLE),
            ("qwen3_moe", {}, fsdp(3), fsdp(4, replicas=2)),
            ("qwen3_moe", {}, SINGLE, megatron(4, expert=2, pipeline=2)),
            ("qwen3_moe", {}, megatron(4, expert=2), megatron(2, tensor=2)),
            ("llama", VALUE, megatron(2, tensor=2), fsdp(2)),
            ("llama", VALUE, fsdp(4, replicas=2), fsdp(2, tensor=2)),
            ("qwen3_moe", VALUE, SINGLE, megatron(4, expert=2, pipeline=2)),
            ("qwen3", BFLOAT16, fsdp(2), fsdp(2, tensor=2)),
            ("qwen3", BFLOAT16, megatron(2, pipeline=2), fsdp(2)),
            ("llama", BFLOAT16, SINGLE, megatron(4, pipeline=2)),
        )
    ],
)
def test_training_goes_on_in_another_layout_as_if_nothing_had_happened(
    toy_dir, tmp_path, architecture, settings, first, second
):
    case = case_of(toy_dir, architecture, **settings)
    begun = train(laid_out(case, first, steps=2, save_to=tmp_path / "checkpoint"))
    resumed = train(laid_out(case, second, steps=3, first_step=2, resume_from=tmp_path / "checkpoint"))
    if case.kind == "language":
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint" / "huggingface")
        for name, weight in saved.named_parameters():
            if name in begun.weights:  # transformers stacks experts
                assert torch.equal(weight, begun.weights[name].to(weight.dtype)), name
    if settings == BFLOAT16:  # rounding separates the layouts themselves, by an amount that depends on the processor
        whole, other = (last_steps(train(laid_out(case, layout))) for layout in (first, second))
        apart = largest_differences(whole, other)
        tolerance = {what: max(limit, 1.5 * apart[what]) for what, limit in BFLOAT16_TOLERANCE.items()}
    else:
        whole, tolerance = last_steps(train(laid_out(case, SINGLE))), TOLERANCE
    assert_equal(resumed, whole, tolerance)


def train_on_memory_of_nans(rank: int, case: Case) -> list[float]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then gives NaN
    assert torch.empty(3).isnan().all()
    return pickle.loads(train_rank(rank, case)).norms


@pytest.mark.parametrize("layout", [megatron(2, tensor=2), pytest.param(fsdp(3), marks=pytest.mark.slow)])
def test_nothing_depends_on_what_memory_held_before(toy_dir, tmp_path, layout):
    case = laid_out(case_of(toy_dir, "qwen2"), layout, steps=2)
    checkpoint = train(replace(case, steps=1, save_to=tmp_path))
    norms, *_ = run_ranks(train_on_memory_of_nans, case.ranks, replace(case, resume_from=tmp_path, first_step=1))
    assert checkpoint.norms[0] > 0
    assert all(norm == norm for norm in norms)


def save_while_training(rank: int, case: Case, directory: Path) -> list[float]:
    """Saves a step at once to `now`, and to `later` after two more steps, in a thread while a third is taken."""
    engine = engine_of(case, rank)

    def step(number: int) -> float:
        batch = global_batch(number, case.kind)
        rows = own_rows(batch, mesh_of(case).index_along(rank, ("data",)), mesh_of(case).axis_size("data"))
        return stepped(engine, rows, loss_of(batch, case.kind))["grad_norm"].value

    step(0)
    engine.save(directory / "now")
    write = engine.save_later(directory / "later")
    thread = threading.Thread(target=write)
    norms = [step(1), step(2)]
    thread.start()
    norms.append(step(3))
    thread.join()
    return norms


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (SINGLE, {"dtype": Dtype.bfloat16}),
        (SINGLE, {"settings": {"lora": Lora(rank=2)}}),
        (fsdp(2), {}),
        pytest.param(megatron(2, tensor=2), {}, marks=pytest.mark.megatron),
    ],
)
def test_a_checkpoint_written_while_training_continues_is_that_of_its_step(toy_dir, tmp_path, layout, settings):
    case = laid_out(case_of(toy_dir, "llama", **settings), layout)
    ranks = (
        [save_while_training(0, case, tmp_path)]
        if case.ranks == 1
        else run_ranks(save_while_training, case.ranks, case, tmp_path)
    )
    assert all(norm > 0 for norms in ranks for norm in norms)
    now, later = (files_below(tmp_path / name) for name in ("now", "later"))
    assert now == later and any(name.endswith(".safetensors") for name in now)
    for name in now:
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes(), name


def save_and_perhaps_die(rank: int, case: Case, directory: Path, dies: bool) -> str:
    engine = engine_of(case, rank)
    batch = global_batch(0, case.kind)
    stepped(engine, own_rows(batch, rank, case.ranks), loss_of(batch, case.kind))
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        engine.save(directory / "actor")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_rank_that_dies_before_it_has_written_its_part_leaves_the_earlier_checkpoint(toy_dir, tmp_path):
    case = laid_out(case_of(toy_dir, "llama"), fsdp(2))
    store = CheckpointStore(tmp_path)

    def write(directory: Path, dies: bool) -> Parts:
        (directory / "actor").mkdir()
        answers = run_ranks(save_and_perhaps_die, 2, case, directory, dies, may_die=True)
        if answers != ["saved", "saved"]:
            raise RuntimeError(str(answers))
        return written_by(directory, "actor")

    store.save(1, lambda directory: write(directory, False), driver_state={"step": 1})
    with pytest.raises(RuntimeError, match="-9"):
        store.save(2, lambda directory: write(directory, True), driver_state={"step": 2})
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    assert [path.name for path in store.directory.iterdir()] == ["step_1"]
