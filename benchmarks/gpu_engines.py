"""Sections of the GPU benchmark that drive engines directly: numbers, attention, memory and speed."""

import gc
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from gpu_case import LARGE, POLICY_GRADIENT, SMALL, Case, Row, batch_of
from workload import SIZES

from hybridflow.batch import Batch
from hybridflow.config.model import Dtype, Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.models.geometry import ModelGeometry, parameter_count, read_geometry
from hybridflow.models.packed_attention import packed_attention
from hybridflow.models.packing import Packing

CPU = torch.device("cpu")


def training_flops_per_token(model: ModelGeometry, context: float) -> float:
    """Operations of forward and backward for a token that attends to `context` tokens, a multiply-add being two.

    The forward pass takes 2 per weight of every matrix and 4 * heads * head_dim * context per layer for attention; both
    passes take three times as many (Kaplan et al. 2020, sec. 2.1).
    """
    experts = max(model.experts_per_token, 1)
    attention = model.hidden * (2 * model.query_width + 2 * model.kv_width)
    matrices = attention + 3 * experts * model.hidden * model.intermediate + model.experts * model.hidden
    forward = model.layers * (2 * matrices + 4 * model.query_width * context) + 2 * model.vocab * model.hidden
    return 3 * forward


def engines_against_the_cpu(case: Case) -> list[Row]:
    """Log-probabilities before and after an optimizer step: each engine on the device, against `single` on the CPU."""
    directory = case.model_directory("small", SIZES["tiny"] if case.is_tiny else SMALL)
    batch = batch_of(rows=8, prompt_tokens=8, response_tokens=24)
    expected = _before_and_after(case.engine(directory, "single", Dtype.float32, CPU), batch)
    kinds = ["single", "fsdp", *(["megatron"] if find_spec("megatron") else [])]
    rows = []
    for dtype in (Dtype.float32, Dtype.bfloat16):
        for kind in kinds:
            found = _before_and_after(case.engine(directory, kind, dtype, case.device), batch)
            for when, ours, theirs in zip(("before", "after"), found, expected, strict=True):
                difference = float((ours - theirs).abs().max())
                rows.append(Row(f"{kind} {dtype.name}: largest difference {when} a step", difference, "nats"))
    return rows


def _before_and_after(engine: TrainEngine, batch: Batch) -> list[torch.Tensor]:
    before = engine.forward(batch, ("logprobs",), temperature=1.0).tokens("logprobs").values.cpu()
    engine.train_step(batch, POLICY_GRADIENT, temperature=1.0)
    return [before, engine.forward(batch, ("logprobs",), temperature=1.0).tokens("logprobs").values.cpu()]


def packed_attention_beside_blocks(case: Case) -> list[Row]:
    """Attention over packed sequences in bfloat16 (FlashAttention on a GPU) against float32 block by block."""
    heads, size, lengths = (2, 32, [5, 17, 40]) if case.is_tiny else (16, 128, [300, 1700, 900, 4096, 1196])
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), heads, size)
    query, key, value = (torch.randn(shape, generator=generator).to(case.device) for _ in range(3))
    packing = Packing(tuple(lengths), case.device)
    exact = packed_attention(query, key, value, packing)
    halves = [part.bfloat16().requires_grad_() for part in (query, key, value)]
    found = packed_attention(halves[0], halves[1], halves[2], packing).detach()
    difference = float((found.float() - exact).abs().max())

    def both_ways(parts: list[torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            packed_attention(parts[0], parts[1], parts[2], packing).sum().backward()

        return call

    wholes = [part.requires_grad_() for part in (query, key, value)]
    flash, blocks = case.seconds(both_ways(halves)), case.seconds(both_ways(wholes))
    return [
        Row("largest difference of bfloat16 from float32", difference),
        Row("bfloat16, forward and backward", 1000 * flash, "ms"),
        Row("float32 block by block, forward and backward", 1000 * blocks, "ms"),
    ]


def offload_peaks(case: Case) -> list[Row]:
    """The most memory of an update with the optimizer, and the weights, on the device or on the host."""
    directory = case.model_directory("large", SIZES["tiny"] if case.is_tiny else LARGE)
    batch = batch_of(rows=4, prompt_tokens=8, response_tokens=24 if case.is_tiny else 512)
    rows = []
    kinds = ["single", "fsdp", *(["megatron"] if find_spec("megatron") else [])]
    for kind in kinds:
        for offload in (False, True):
            engine = case.engine(directory, kind, Dtype.bfloat16, case.device, offload_optimizer=offload)
            engine.train_step(batch, POLICY_GRADIENT, temperature=1.0)
            where = "host" if offload else "device"
            peak = case.peak_mib(lambda engine=engine: engine.train_step(batch, POLICY_GRADIENT, temperature=1.0))
            rows.append(Row(f"{kind}: peak of an update, optimizer on the {where}", peak, "MiB"))
            seconds = case.seconds(
                lambda engine=engine: engine.train_step(batch, POLICY_GRADIENT, temperature=1.0), rounds=2
            )
            rows.append(Row(f"{kind}: seconds of it", seconds, "s"))
            del engine
            gc.collect()  # an offloaded optimizer and its state refer to each other
            if case.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def generation_speed(case: Case) -> list[Row]:
    """Tokens per second of the transformers rollout, by rows at once."""
    directory = case.model_directory("large", SIZES["tiny"] if case.is_tiny else LARGE)
    tokens = 8 if case.is_tiny else 128
    rows = []
    for at_once in (2, 4) if case.is_tiny else (16, 64, 256):
        engine = make_rollout_engine(
            Model(path=str(directory), dtype=Dtype.bfloat16),
            Rollout(engine=RolloutKind.transformers, max_sequences=at_once),
            limit_tokens=16 + tokens,
            eos_token_ids=(1,),
            device=case.device,
        )
        prompts = batch_of(at_once, prompt_tokens=16, response_tokens=2)
        prompts = Batch.of(
            rows={"uid": torch.arange(at_once), "sample_index": torch.zeros(at_once, dtype=torch.long)},
            tokens={"prompt_ids": prompts.tokens("prompt_ids")},
        )

        def generate(engine=engine, prompts=prompts) -> None:
            engine.generate(prompts, Sampling(ignore_eos=True), max_response_tokens=tokens, seed=0)

        seconds = case.seconds(generate, rounds=2)
        rows.append(Row(f"transformers, {at_once} rows at once", at_once * tokens / seconds, "tokens/s"))
    return rows


def update_speed(case: Case) -> list[Row]:
    """Tokens per second of an update in bfloat16, and its share of the card's peak."""
    directory = case.model_directory("large", SIZES["tiny"] if case.is_tiny else LARGE)
    geometry = read_geometry(directory)
    batch = batch_of(rows=4 if case.is_tiny else 32, prompt_tokens=16, response_tokens=24 if case.is_tiny else 1008)
    lengths = batch.tokens("prompt_ids").lengths + batch.tokens("response_ids").lengths
    tokens, context = int(lengths.sum()), float((lengths * (lengths + 1)).sum() / 2 / lengths.sum())
    rows = [Row("parameters", parameter_count(geometry) / 1e6, "M")]
    for kind in ["single", "fsdp", *(["megatron"] if find_spec("megatron") else [])]:
        compiles = TRAINING_ENGINES[TrainingEngine[kind]].compiles_layers
        for choice in ("", "gradient_checkpointing", *(["compile"] if compiles else [])):
            chosen = {"gradient_checkpointing": False} | ({choice: True} if choice else {})
            engine = case.engine(
                directory, kind, Dtype.bfloat16, case.device,
                microbatch_tokens=64 if case.is_tiny else 16384, **chosen,
            )  # fmt: skip

            def update(engine=engine) -> None:
                engine.train_step(batch, POLICY_GRADIENT, temperature=1.0)

            started = time.perf_counter()
            update()
            first = time.perf_counter() - started
            seconds = case.seconds(update, rounds=2)
            name = f"{kind}{choice and f', {choice}'}"
            rows.append(Row(f"{name}: the first update", first, "s"))
            rows.append(Row(name, tokens / seconds, "tokens/s"))
            flops = tokens * training_flops_per_token(geometry, context) / seconds
            rows.append(Row(f"{name}: useful operations", flops / 1e12, "TFLOP/s"))
            if case.peak_flops is not None:
                rows.append(Row(f"{name}: share of the card's peak", 100 * flops / case.peak_flops, "%"))
            del engine
            gc.collect()  # an offloaded optimizer and its state refer to each other
            if case.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows
