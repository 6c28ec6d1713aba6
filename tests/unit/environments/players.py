"""A player over a toy model, and batches of prompts."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.environments.play import EpisodePlayer
from hybridflow.workers.episode_sampler import EpisodeSampler
from tests.toys import toy_model

FILE = Path(__file__).with_name("toy_environments.py")
END = 1
"""The token that ends a reply."""


class Player:
    """Plays episodes of an environment with a random model, and counts the batches it samples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "",
        *,
        prompt_tokens: int = 40,
        tokens: int = 60,
        **settings,
    ) -> None:
        own = name if ":" in name or (name.islower() and "_" in name) else f"{FILE}:{name}"
        config = EnvironmentSettings(name=None if "program" in settings else own, **settings)
        limits = {"max_prompt_tokens": prompt_tokens, "max_response_tokens": tokens}
        self.player = EpisodePlayer(config, tokenizer, (END,), **limits)
        self.model = toy_model("llama")
        self.engine = TransformersEngine(self.model, max_sequences=64, eos_token_ids=(END,))
        self._sampler = EpisodeSampler(self.engine, Sampling(), seed=3)
        self.batches: list[Batch] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.player.close()

    def play(self, prompts: Batch, *, is_evaluation: bool = False) -> Batch:
        """The episodes of the prompts."""
        return prompts.join(self.player.play(prompts, self, seed=3, is_evaluation=is_evaluation))

    def submit(self, rows: Batch, *, max_tokens: int) -> None:
        """Samples as the rollout does."""
        self.batches.append(rows)
        self._sampler.submit(rows, max_tokens=max_tokens)

    def poll(self) -> Batch:
        return self._sampler.poll()

    def withdraw(self) -> None:
        self._sampler.withdraw()


def prompts_of(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, samples: int = 1, **columns: list) -> Batch:
    """Texts as a loader gives them; the uids begin at 5."""
    ids = Ragged.from_rows([tokenizer.encode(text) for text in texts], torch.int64)
    batch = Batch.of(
        rows={"uid": torch.arange(len(texts)) + 5},
        tokens={"prompt_ids": ids},
        objects={"prompt": texts, **columns},
    )
    return batch.repeat(samples)
