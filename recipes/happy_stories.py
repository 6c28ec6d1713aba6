"""A story model learns to tell happier stories with PPO, under a KL penalty against the original model.

Question:  can PPO with a reference model raise the sentiment of short stories without breaking their language?
Hardware:  2 CPU cores, or a GPU.
Minutes:   about 10 on 2 CPU cores.
Command:   python recipes/happy_stories.py PATH/TO/stories15M [key=value ...]
           PATH is any causal language model that continues stories; needs pip install '.[recipes]'.
Expect:    mean sentiment (VADER, -1 to 1) up by at least 0.2 within 40 steps, KL below 0.5 per token.

Prompts are openings of stories; each is continued with 40 tokens, and `happiness` below scores the continuation.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

from hybridflow.optional import require
from hybridflow.trainer import main_ppo

HEROES = ("Lily", "Tom", "Mia", "Ben", "Sara", "Max", "Anna", "Tim")
OPENINGS = (
    "Once upon a time, there was a little child named {}.",
    "One day, {} went to the park.",
    "{} was playing in the garden when it began to rain.",
    "{} lost a favorite toy.",
    "It was a dark night, and {} heard a noise.",
    "{} had a big red ball.",
    "{} and a friend wanted the same cookie.",
    "In the morning, {} woke up and looked out of the window.",
)
RUN_DIR = Path("runs/happy_stories")


def happiness(completions: list[str], **columns: object) -> list[float]:
    """VADER's compound sentiment of each continuation, from -1 (sad) to 1 (happy)."""
    analyzer = require("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(completion)["compound"] for completion in completions]


def write_prompts(directory: Path) -> tuple[Path, Path]:
    """Training and held-out openings: the last hero is kept for the evaluation."""
    directory.mkdir(parents=True, exist_ok=True)
    files = directory / "train.jsonl", directory / "eval.jsonl"
    for file, heroes in zip(files, (HEROES[:-1], HEROES[-1:]), strict=True):
        rows = [{"prompt": opening.format(hero)} for hero, opening in product(heroes, OPENINGS)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def main() -> int:
    """Train; the report is in the run directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the directory of a causal language model that writes stories")
    parser.add_argument("overrides", nargs="*", help="settings of the training, key=value")
    given = parser.parse_args()
    require("vaderSentiment")
    train, held_out = write_prompts(RUN_DIR.with_name("stories"))
    settings = [
        f"model.path={given.model}",
        f"data.train_files=[{train}]",
        f"data.eval_files=[{held_out}]",
        f"reward.functions=[{Path(__file__).resolve()}:happiness]",
        f"trainer.run_dir={RUN_DIR}",
        "trainer.experiment=happy_stories",
        "trainer.total_steps=40",
        "trainer.eval_every=10",
        "trainer.save_every=20",
        "trainer.samples_every=10",
        "data.batch_size=32",
        "data.max_prompt_tokens=32",
        "data.max_response_tokens=40",
        "rollout.eval_samples_per_prompt=4",
        "actor.minibatch_size=16",
        "critic.minibatch_size=16",
        "actor.epochs=1",
        "actor.optimizer.learning_rate=1e-5",
        "critic.optimizer.learning_rate=1e-4",
        "algorithm.kl.placement=reward",
        "algorithm.kl.coefficient=0.02",
        "algorithm.lam=0.95",
    ]
    return main_ppo.main([*settings, *given.overrides])


if __name__ == "__main__":
    sys.exit(main())
