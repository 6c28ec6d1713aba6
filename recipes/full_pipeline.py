"""From a story model and a file of preferences to an aligned model: SFT, reward model, PPO, and a comparison.

Question:  does PPO against a reward model of people's choices make answers that the reward model likes better, without
           leaving the supervised model far behind?
Hardware:  2 CPU cores, or a GPU.
Minutes:   about 25 on 2 CPU cores with stories15M (15 M parameters).
Command:   python recipes/full_pipeline.py MODEL PAIRS [--steps SFT,RM,PPO] [key=value ...]
           MODEL is a causal language model's directory; PAIRS a file with `chosen` and `rejected` dialogues, such as
           harmless-base of Anthropic's HH. Settings beside are handed to all three trainers.
Expect:    with stories15M and the 2,312 harmless-base pairs of HH's test split: held-out perplexity of the chosen
           answers from 143 to 40; 0.66 of 105 held-out pairs ranked as people did (0.56 to 0.74); the reward of
           held-out prompts from 0.10 to 0.56 by PPO, at a divergence of at most 0.12 a token. The page
           runs/pipeline/comparison.md scores three models' answers: +0.17 before, +0.47 supervised, +0.74 by PPO.

The three trainers are the ones behind `python -m hybridflow.trainer.main_sft`, `main_reward_model` and `main_ppo`. The
comparison uses transformers alone, so that what it says of the trained models does not depend on this package.
"""

import argparse
import gzip
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from hybridflow.trainer import main_ppo, main_reward_model, main_sft

RUNS = Path("runs/pipeline")
ANSWER = "\n\nAssistant:"
LONGEST = 160
LIMITS = [f"data.max_prompt_tokens={LONGEST}", "data.max_response_tokens=64", "data.drop_long_prompts=true"]


def write_data(pairs: Path, folder: Path) -> None:
    """Pairs, demonstrations (the chosen answers) and prompts; every tenth dialogue is held out."""
    text = gzip.decompress(pairs.read_bytes()).decode() if pairs.suffix == ".gz" else pairs.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("eval", rows[::10]), ("train", [row for i, row in enumerate(rows) if i % 10])):
        split = [(*row["chosen"].rpartition(ANSWER)[::2], *row["rejected"].rpartition(ANSWER)[::2]) for row in part]
        split = [(prompt + ANSWER, c, r) for prompt, c, other, r in split if prompt and prompt == other and c and r]
        kinds = {
            "pairs": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in split],
            "demonstrations": [{"prompt": p, "completion": c} for p, c, _ in split],
            "prompts": [{"prompt": p} for p, _, _ in split],
        }
        for kind, content in kinds.items():
            lines = (json.dumps(row) + "\n" for row in content)
            (folder / f"{kind}.{name}.jsonl").write_text("".join(lines))


def files(folder: Path, kind: str) -> list[str]:
    """The settings that name the files of one kind."""
    return [f"data.train_files=[{folder}/{kind}.train.jsonl]", f"data.eval_files=[{folder}/{kind}.eval.jsonl]"]


def train(trainer: Callable[[list[str]], int], stage: str, chosen: list, overrides: list[str]) -> None:
    """One stage: a model, a number of steps and settings; a failure ends the recipe."""
    model, steps, *further = chosen
    run = [f"trainer.run_dir={RUNS / stage}", f"trainer.experiment={stage}", f"trainer.total_steps={steps}"]
    often = [f"trainer.eval_every={max(1, steps // 4)}"]
    if status := trainer([f"model.path={model}", *run, *often, *LIMITS, *further, *overrides]):
        sys.exit(status)


def trained(stage: str, role: str) -> str:
    """The last checkpoint's model of a role."""
    steps = (RUNS / stage / "checkpoints").glob("step_*")
    return str(max(steps, key=lambda path: int(path.name.removeprefix("step_"))) / role / "huggingface")


def answers(model: str, prompts: Sequence[str]) -> list[str]:
    """One sampled answer a prompt, by transformers."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = policy.generate(ids, max_new_tokens=64, do_sample=True, pad_token_id=tokenizer.eos_token_id)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def scores(model: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The reward model's score of each answer, by transformers: what it says at the last token."""
    tokenizer, judge = AutoTokenizer.from_pretrained(model), AutoModelForTokenClassification.from_pretrained(model)
    ids = [[*tokenizer(p + r).input_ids, tokenizer.eos_token_id] for p, r in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        return [float(judge(torch.tensor([row])).logits[0, -1, 0]) for row in ids]


def compare(models: dict[str, str], judge: str, prompts: Sequence[str]) -> str:
    """A page with each model's mean score and its answers, prompt by prompt."""
    transformers_logging.disable_progress_bar()
    responses_of = {name: answers(model, prompts) for name, model in models.items()}
    judged = {name: scores(judge, prompts, responses) for name, responses in responses_of.items()}
    lines = ["| model | mean score |", "|---|---|"]
    lines += [f"| {name} | {sum(found) / len(found):+.3f} |" for name, found in judged.items()]
    for number, prompt in enumerate(prompts[:8]):
        lines += ["", f"## {prompt.strip().splitlines()[0]}", ""]
        for name, responses in responses_of.items():
            text = " ".join(responses[number].split())
            lines.append(f"- **{name}** ({judged[name][number]:+.2f}): {text}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The three trainings, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--steps", default="30,45,60", help="steps of SFT, reward model and PPO")
    parser.add_argument("overrides", nargs="*", help="settings for all three trainers, key=value")
    given = parser.parse_intermixed_args()
    sft, rm, ppo = map(int, given.steps.split(","))
    data = RUNS / "data"
    write_data(given.pairs, data)

    learn = ["data.batch_size=32", "actor.optimizer.warmup_steps=5"]
    of_sft, of_rm = "actor.optimizer.learning_rate=1e-4", "actor.optimizer.learning_rate=3e-5"
    train(main_sft.main, "sft", [given.model, sft, *files(data, "demonstrations"), *learn, of_sft], given.overrides)
    start = trained("sft", "actor")
    train(main_reward_model.main, "rm", [start, rm, *files(data, "pairs"), *learn, of_rm], given.overrides)
    judge = trained("rm", "reward_model")
    limit = ["algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.05", "algorithm.lam=0.95"]
    rates = ["data.batch_size=32", "actor.optimizer.learning_rate=1e-5", "critic.optimizer.learning_rate=1e-4"]
    against = [f"reward.model.path={judge}", f"critic.model.path={judge}", *limit, *rates]
    train(main_ppo.main, "ppo", [start, ppo, *files(data, "prompts"), *against], given.overrides)
    asked = [json.loads(line)["prompt"] for line in (data / "prompts.eval.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(start)
    prompts = [prompt for prompt in asked if len(tokenizer.tokenize(prompt)) <= LONGEST][:48]
    models = {"start": given.model, "sft": start, "ppo": trained("ppo", "actor")}
    page = compare(models, judge, prompts)
    (RUNS / "comparison.md").write_text(page)
    sys.stdout.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
