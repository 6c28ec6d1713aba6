"""What the optimal token baseline asks of a model: on every engine the sum of squares of an explicit softmax."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.batch import Batch
from hybridflow.config.training import TrainingEngine
from tests.oracles.logprobs import sum_pi_squared
from tests.parity.divided import Case, engine_of, global_batch, mesh_of, own_rows
from tests.spmd import run_ranks
from tests.toys import TEMPERATURE, logprobs_of

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67}
FSDP, MEGATRON = TrainingEngine.fsdp, TrainingEngine.megatron


def explicit(directory: Path, batch: Batch) -> Tensor:
    """Row by row, through the whole table."""
    model, found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), []
    for i in range(len(batch)):
        prompt, response = (batch.tokens(name).row(i) for name in ("prompt_ids", "response_ids"))
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        squares = sum_pi_squared(logits, TEMPERATURE)
        found.append(squares[len(prompt) - 1 : len(prompt) - 1 + len(response)])
    return torch.cat(found)


def asked_rank(rank: int, case: Case) -> bytes:
    """The sums of squares by a rank's engine, and its log-probabilities with and without them."""
    mesh, engine, batch = mesh_of(case), engine_of(case, rank), global_batch(0, "language")
    rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
    asked = engine.forward(rows, ("entropy", "sum_pi_squared", "logprobs"), temperature=TEMPERATURE)
    columns = [asked.tokens(name).values for name in ("sum_pi_squared", "logprobs")]
    return pickle.dumps((*columns, logprobs_of(engine, rows).values))


@pytest.mark.parametrize(
    ("engine", "ranks", "sizes"),
    [
        (TrainingEngine.single, 1, {}),
        (FSDP, 2, {"tensor": 2}),
        pytest.param(FSDP, 2, {}, marks=pytest.mark.slow),
        pytest.param(FSDP, 2, {"sequence": 2}, marks=pytest.mark.slow),
        pytest.param(MEGATRON, 2, {"tensor": 2}, marks=pytest.mark.megatron),
        pytest.param(MEGATRON, 2, {"pipeline": 2}, marks=[pytest.mark.megatron, pytest.mark.slow]),
    ],
)
def test_sums_of_squares_are_those_of_the_whole_table(toy_dir, engine, ranks, sizes):
    directory = toy_dir("llama", **HEADS)
    # A few tokens per microbatch, so that ranks have different numbers of them.
    case = replace(Case(directory, ranks, engine, sizes), settings={"microbatch_tokens": 12})
    answers = [asked_rank(0, case)] if ranks == 1 else run_ranks(asked_rank, ranks, case)
    columns = [pickle.loads(answer) for answer in answers]
    mesh = mesh_of(case)
    firsts = [mesh.rank({"data": index, "pipeline": -1}) for index in range(mesh.axis_size("data"))]
    found = torch.cat([columns[rank][0] for rank in firsts])
    # float32 against float64
    torch.testing.assert_close(found.double(), explicit(directory, global_batch(0, "language")), atol=1e-5, rtol=1e-4)
    for _, beside, alone in columns:
        assert torch.equal(beside, alone), "bit for bit, whatever else is computed"
