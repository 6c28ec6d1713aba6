"""Roles that are never updated: the reference, and reward functions."""

import json

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.config.training import Training
from hybridflow.controller.worker import WorkerContext
from hybridflow.models.tokenizers import load_tokenizer
from hybridflow.parallel import ParallelMesh
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward_function import RewardFunctionWorker
from tests.toys import sequences
from tests.unit.workers.roles import actor

ANSWERS = ["42", "7", "13"]


def rewards(directory, **settings) -> RewardFunctionWorker:
    return RewardFunctionWorker(WorkerContext("reward"), reward=Reward(**settings), model=Model(path=str(directory)))


def answered(directory, responses: list[str]) -> Batch:
    """Responses as token ids, with the end of sequence that a rollout leaves in."""
    tokenizer = load_tokenizer(directory)
    ids = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in responses]
    return Batch.of(
        rows={"uid": torch.arange(len(responses))},
        tokens={"response_ids": Ragged.from_rows(ids, torch.int64)},
        objects={"prompt": [f"prompt {i}" for i in range(len(responses))], "answer": ANSWERS[: len(responses)]},
    )


def test_the_references_logprobs_are_those_of_the_model_it_was_made_from(toy_dir):
    reference = ReferenceWorker(
        WorkerContext("reference"), model=Model(path=str(toy_dir())), training=Training(), temperature=0.7
    )
    batch, warm = sequences(), Rollout(sampling=Sampling(temperature=0.7))
    found = reference.logprobs(batch).tokens("ref_logprobs").values
    assert torch.equal(found, actor(toy_dir(), rollout=warm).logprobs(batch).tokens("old_logprobs").values)


def test_components_are_the_functions_scores_side_by_side_in_their_order(toy_dir, tmp_path):
    (tmp_path / "even.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [None if text == '8' else 2.0 for text in completions]\n"
    )
    functions = [f"{tmp_path}/even.py:even", "exact_match"]
    scored = rewards(toy_dir(), functions=functions, weights=[0.5, 1.0]).score(answered(toy_dir(), ["42", "8", "13"]))
    found = scored.row("components")
    assert found.shape == (3, 2)
    assert found[1, 0].isnan()
    assert found.nan_to_num(-1.0).tolist() == [[2.0, 1.0], [-1.0, 0.0], [2.0, 1.0]]
    assert scored.row("scores").tolist() == [2.0, 0.0, 2.0]


def test_functions_receive_prompts_texts_without_special_tokens_and_the_datas_columns(toy_dir, tmp_path):
    (tmp_path / "own.py").write_text(
        "import json, pathlib\n"
        "def seen(prompts, completions, answer, completion_ids, **columns):\n"
        f"    kept = [prompts, completions, answer, [len(ids) for ids in completion_ids], sorted(columns)]\n"
        f"    pathlib.Path({str(tmp_path / 'seen.json')!r}).write_text(json.dumps(kept))\n"
        "    return [0.5 for _ in prompts]\n"
    )
    scored = rewards(toy_dir(), functions=[f"{tmp_path}/own.py:seen"]).score(answered(toy_dir(), ["42", "8"]))
    assert scored.row("scores").tolist() == [0.5, 0.5]
    prompts, texts, answers, lengths, _ = json.loads((tmp_path / "seen.json").read_text())
    assert (prompts, texts, answers) == (["prompt 0", "prompt 1"], ["42", "8"], ["42", "7"])
    assert lengths == [3, 2]


def test_of_ranks_with_the_same_rows_one_calls_the_functions(toy_dir, tmp_path):
    calls = tmp_path / "calls"
    (tmp_path / "counted.py").write_text(
        "def counted(prompts, completions, **columns):\n"
        f"    open({str(calls)!r}, 'a').write('x')\n"
        "    return [1.0 for _ in completions]\n"
    )
    reward = Reward(functions=[f"{tmp_path}/counted.py:counted"])
    for rank in range(2):
        context = WorkerContext("reward", rank, ParallelMesh({"data": 1, "tensor": 2}))
        worker = RewardFunctionWorker(context, reward=reward, model=Model(path=str(toy_dir())))
        scored = worker.score(answered(toy_dir(), ["42"]))
        worker.close()
        assert scored.row("scores").tolist() == [1.0 - rank]
    assert calls.read_text() == "x"
