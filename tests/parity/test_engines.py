"""Five steps of AdamW on FSDP and Megatron-Core, in every layout, against one device.

The plain engine is held to a loop over rows elsewhere; here losses, gradient norms, outputs and weights of every
layout must be its own, whoever has how many rows, in however many microbatches.
"""

from dataclasses import replace

import pytest
import torch

from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora, TrainingEngine
from tests.parity.divided import BFLOAT16_TOLERANCE, TOLERANCE, Case, assert_equal, on, train
from tests.spmd import preload

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TENSOR, PIPELINE, EXPERT, REPLICAS = {"tensor": 2}, {"pipeline": 2}, {"expert": 2}, {"replicas": 2}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
TURNS = {"pipeline": 2, "virtual_pipeline": 2}
BOTH = {**TENSOR, **PIPELINE}
WHOLE_STATE = {"distributed_optimizer": False}

FAST = {
    "fsdp": [
        ("llama", "language", 2, {}),
        ("qwen3", "language", 2, TENSOR),
        ("qwen2", "language", 2, {"sequence": 2}),
        ("qwen3_moe", "language", 2, REPLICAS),
        ("qwen3", "value", 2, {}),
    ],
    "megatron": [
        ("qwen2", "language", 2, SEQUENCE),
        ("llama", "language", 2, TURNS),
        ("qwen2", "language", 2, {}),
        ("llama", "language", 2, WHOLE_STATE),
        ("qwen3", "language", 4, BOTH),
        ("qwen3_moe", "language", 2, EXPERT),
        ("qwen3", "value", 2, SEQUENCE),
    ],
}
LAYOUTS = {
    "fsdp": [
        *((ranks, {}) for ranks in (1, 2, 3, 4)),
        *((ranks, REPLICAS) for ranks in (2, 4)),
        *((ranks, {"sequence": size}) for ranks, size in ((2, 2), (4, 2), (4, 4))),
        *((ranks, TENSOR) for ranks in (2, 4)),
        *((4, {**TENSOR, **more}) for more in (REPLICAS, {"sequence": 2})),
    ],
    "megatron": [
        *((ranks, {}) for ranks in (1, 2, 4)),
        (3, WHOLE_STATE),
        *((ranks, sizes) for ranks in (2, 4) for sizes in (TENSOR, PIPELINE)),
        *((2, sizes) for sizes in (SEQUENCE, TURNS)),
        *((4, sizes) for sizes in ({"pipeline": 4}, BOTH, {**SEQUENCE, **WHOLE_STATE})),
        *((4, {**TURNS, **more}) for more in (WHOLE_STATE, SEQUENCE)),
    ],
}
EXPERT_LAYOUTS = [
    *((2, {**EXPERT, **more}) for more in ({}, WHOLE_STATE)),
    (4, {"expert": 4}),
    *((4, {**EXPERT, **more}) for more in ({}, TENSOR, PIPELINE, {**TURNS, **WHOLE_STATE})),
]


def slow_cases(engine: str) -> list[tuple[str, str, int, dict[str, object]]]:
    """Every architecture in every layout that the engine has for it; values of two of them."""
    experts = EXPERT_LAYOUTS if engine == "megatron" else []
    return [
        (architecture, kind, ranks, sizes)
        for architecture in ("llama", "qwen2", "qwen3", "qwen3_moe")
        for kind in ("language", "value")
        for ranks, sizes in LAYOUTS[engine] + (experts if architecture == "qwen3_moe" else [])
        if not (engine == "fsdp" and architecture == "qwen3_moe" and "tensor" in sizes)
        if kind == "language" or architecture in ("qwen3", "qwen3_moe")
    ]


def case_of(
    toy_dir, engine: str, architecture: str, kind: str, ranks: int, sizes: dict[str, object], **settings: object
) -> Case:
    layers = {"num_hidden_layers": 4} if engine == "megatron" else {}
    directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS, **layers)
    return Case(directory, ranks, TrainingEngine[engine], sizes, kind, settings=settings)


@pytest.mark.parametrize(
    ("engine", "architecture", "kind", "ranks", "sizes"),
    [on(engine, *case) for engine, cases in FAST.items() for case in cases]
    + [on(engine, *case, slow=True) for engine in FAST for case in slow_cases(engine)],
)
def test_five_steps_equal_those_of_one_device(toy_dir, plain, engine, architecture, kind, ranks, sizes):
    case = case_of(toy_dir, engine, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("engine", "architecture", "ranks", "sizes"),
    [
        on("fsdp", "qwen3", 2, {}),
        *(on("fsdp", "qwen3", 2, sizes, slow=True) for sizes in (TENSOR, {"sequence": 2})),
        on("fsdp", "qwen3", 4, REPLICAS, slow=True),
        on("megatron", "qwen3", 2, TURNS),
        on("megatron", "qwen3", 2, SEQUENCE, slow=True),
        on("megatron", "qwen2", 2, {}, slow=True),
        on("megatron", "qwen3", 4, {**PIPELINE, **SEQUENCE}, slow=True),
        on("megatron", "qwen3_moe", 2, EXPERT, slow=True),
    ],
)
def test_neither_micro_batches_nor_recomputed_layers_change_anything(
    toy_dir, plain, engine, architecture, ranks, sizes
):
    settings = {"microbatch_tokens": 12, "gradient_checkpointing": True}
    case = case_of(toy_dir, engine, architecture, "language", ranks, sizes, **settings)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("engine", "architecture", "kind", "ranks", "sizes", "settings"),
    [
        on("single", "qwen3", "language", 1, {}, {"microbatch_tokens": 24}, slow=True),
        *(
            on("single", "mistral", kind, 1, {}, {"gradient_checkpointing": True}, slow=True)
            for kind in ("language", "value")
        ),
        on("single", "llama", "language", 1, {}, {"lora": Lora(rank=4)}, slow=True),
        *(on("fsdp", "llama", "language", 2, sizes, {}, slow=True) for sizes in ({}, {"sequence": 2})),
        on("fsdp", "qwen3_moe", "language", 2, {}, {"gradient_checkpointing": True}, slow=True),
    ],
)
def test_compiled_layers_give_the_numbers_of_plain_ones(
    toy_dir, plain, engine, architecture, kind, ranks, sizes, settings
):
    case = case_of(toy_dir, engine, architecture, kind, ranks, sizes, compile=True, **settings)
    case = replace(case, with_prefixes=True)
    assert_equal(train(case), plain(case))
    assert ranks > 1 or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("microbatch_tokens", [pytest.param(8192, marks=pytest.mark.slow), 24])
@pytest.mark.parametrize(
    ("engine", "architecture", "kind", "ranks", "sizes"),
    [
        on("single", "llama", "language", 1, {}),
        on("single", "mistral", "language", 1, {}),
        on("fsdp", "qwen3", "language", 2, {}),
        on("fsdp", "qwen2", "language", 2, {"sequence": 2}),
        on("megatron", "qwen3", "language", 2, TENSOR),
        on("fsdp", "qwen3", "value", 2, TENSOR, slow=True),
        on("megatron", "llama", "value", 2, SEQUENCE, slow=True),
        on("megatron", "llama", "language", 2, TURNS, slow=True),
        on("megatron", "qwen3_moe", "language", 2, EXPERT, slow=True),
    ],
)
def test_rows_that_share_prefixes_give_the_numbers_of_rows_apart(
    toy_dir, plain, engine, architecture, kind, ranks, sizes, microbatch_tokens
):
    case = case_of(toy_dir, engine, architecture, kind, ranks, sizes, microbatch_tokens=microbatch_tokens)
    case = replace(case, with_prefixes=True)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize("architecture", ["mistral", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_ranks_that_divide_tokens_keep_to_a_models_windows(toy_dir, plain, architecture):
    window = {"sliding_window": 4} | (
        {"use_sliding_window": True, "max_window_layers": 1} if architecture == "qwen2" else {}
    )
    directory = toy_dir(architecture, **window, **HEADS)
    case = Case(directory, 2, TrainingEngine.fsdp, {"sequence": 2}, steps=2)
    assert_equal(train(case), plain(case))


@pytest.mark.megatron
def test_a_vocabulary_that_ranks_do_not_divide_is_padded(toy_dir, plain):
    case = Case(toy_dir("llama", vocab_size=67, **HEADS), 2, TrainingEngine.megatron, TENSOR, steps=2)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("architecture", "kind", "dtype", "limit"),
    [
        ("llama", "language", Dtype.float32, 100 * TOLERANCE["weights"]),
        ("qwen3", "language", Dtype.bfloat16, 1.5 * BFLOAT16_TOLERANCE["weights"]),
        ("qwen3", "value", Dtype.bfloat16, 1.5 * BFLOAT16_TOLERANCE["weights"]),
    ],
)
def test_the_tolerance_would_show_a_lost_row(toy_dir, plain, architecture, kind, dtype, limit):
    case = replace(case_of(toy_dir, "fsdp", architecture, kind, 1, {}), dtype=dtype)
    lost, whole = train(replace(case, lost_rows=1)).weights, plain(case).weights
    assert max(float((lost[name] - whole[name]).abs().max()) for name in whole) > limit


@pytest.mark.parametrize(
    ("engine", "ranks", "sizes"),
    [
        on("fsdp", 2, {}),
        on("fsdp", 1, {}, slow=True),
        *(on("fsdp", 2, sizes, slow=True) for sizes in (TENSOR, {"sequence": 2}, REPLICAS)),
        on("megatron", 2, {}),
        *(on("megatron", 2, sizes, slow=True) for sizes in (SEQUENCE, WHOLE_STATE)),
        on("megatron", 4, BOTH, slow=True),
    ],
)
@pytest.mark.parametrize("kind", ["language", pytest.param("value", marks=pytest.mark.slow)])
def test_bfloat16_weights_follow_float32_copies(toy_dir, plain, kind, engine, ranks, sizes):
    case = replace(case_of(toy_dir, engine, "qwen3", kind, ranks, sizes), dtype=Dtype.bfloat16)
    found = train(case)
    formats = {name: weight.dtype for name, weight in found.weights.items()}
    assert {formats.pop(name, torch.float32) for name in ("score.weight", "score.bias")} == {torch.float32}
    assert set(formats.values()) == {torch.bfloat16}
    assert_equal(found, plain(case), BFLOAT16_TOLERANCE)
