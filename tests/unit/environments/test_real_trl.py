"""The same replies in TRL's GRPOTrainer and here: the same token ids, mask and reward (`make adapters`)."""

from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.batch import Batch
from tests.unit.environments import trl_environments
from tests.unit.environments.played import call
from tests.unit.environments.players import Parrot, conversations

pytestmark = pytest.mark.library("trl")

FILE = Path(trl_environments.__file__)
FAMILY = "qwen2_5"
ROW = {"prompt": [{"role": "user", "content": "Begin."}], "answer": "5"}


def trained(tmp_path: Path, replies: list[list[int]], **given: object) -> tuple[list[int], list[int], list[int], float]:
    """Prompt, completion, mask and reward of one rollout of TRL, which samples these replies."""
    trl = import_module("trl")
    tokenizer = copy(Parrot(FAMILY).tokenizer)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes))
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=900,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([ROW]),
        processing_class=tokenizer,
        **given,
    )
    left, kept = iter(replies), {}

    def sampled(prompt_ids: list, *_: object, **__: object) -> tuple[list[list[int]], None]:
        reply = next(left)
        return [[*reply] for _ in prompt_ids], None

    def recorded(name: str, method: object, *arguments: object) -> object:
        kept[name] = method(*arguments)
        return kept[name]

    trainer._generate_single_turn = sampled
    for name in ("_generate", "_calculate_rewards"):
        setattr(trainer, name, partial(recorded, name, getattr(trainer, name)))
    trainer._generate_and_score_completions([dict(ROW), dict(ROW)])
    prompt_ids, completion_ids, mask, *_ = kept["_generate"]
    return prompt_ids[0], completion_ids[0], mask[0], float(kept["_calculate_rewards"][0].sum())


def columns(found: Batch) -> list[list[int]]:
    return [found.tokens(name).row(0).tolist() for name in ("prompt_ids", "response_ids", "response_mask")]


@pytest.mark.parametrize(
    ("name", "replies"),
    [
        ("Counter", [call("increment", by=2), call("increment", by=3, note="now "), "done"]),
        ("Counter", [call("increment", by=2) + "\n" + call("increment", by=2), "done"]),
        ("Counter", ["I will not"]),
        ("TOOLS", [call("double", number=12), "24"]),
    ],
)
def test_an_environment_factory_and_a_list_of_tools(tmp_path, name, replies):
    model = Parrot(FAMILY, *replies)
    factory = {"environment_factory": trl_environments.Counter}
    tools = {"tools": trl_environments.TOOLS, "reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    *theirs, reward = trained(tmp_path, [*model.replies], **(factory if name == "Counter" else tools))
    prompts = conversations(["Begin."], answer=["5"])
    ours = model.play(prompts, name=f"{FILE}:{name}", processes=0, max_turns=4, max_turn_tokens=200)
    assert columns(ours) == theirs
    assert ours.object("episode_return") == [pytest.approx(reward)]
