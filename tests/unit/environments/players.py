"""A player over a toy model, and batches of prompts."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.environments.interface import ModelInfo
from hybridflow.environments.play import EpisodePlayer
from hybridflow.parallel.groups import Ranks
from hybridflow.workers.row_sampler import RowSampler
from tests.toys import toy_model
from tests.unit.environments.families import end_id, tokenizer_of

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
        gamma: float = 1.0,
        ranks: Ranks | None = None,
        **settings,
    ) -> None:
        own = name if ":" in name or (name.islower() and "_" in name) else f"{FILE}:{name}"
        config = EnvironmentSettings(name=None if "program" in settings else own, **settings)
        info = ModelInfo(tokenizer, prompt_tokens, tokens, config.max_turns)
        self.player = EpisodePlayer(config, info, (END,), gamma=gamma, ranks=ranks)
        self.model = toy_model("llama")
        self.engine = TransformersEngine(self.model, max_sequences=64, eos_token_ids=(END,))
        self._sampler = RowSampler(self.engine, Sampling(), 3, tokens)
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

    def withdraw(self, rows: Batch | None = None) -> Batch:
        return self._sampler.withdraw(rows)


class Parrot:
    """A model that gives these replies, and the last of them to everything after it, with the tokenizer of a family."""

    def __init__(self, family: str, *replies: str) -> None:
        self.tokenizer, self.end = tokenizer_of(family), end_id(family)
        self.prompts: list[str] = []
        self.replies = [
            [*self.tokenizer.encode(reply, add_special_tokens=False), self.end] for reply in replies or ("fine",)
        ]
        self._sampled: list[Batch] = []

    def play(self, prompts: Batch, *, model_type: str | None = None, **settings) -> Batch:
        """The episodes of an environment."""
        config = EnvironmentSettings(**settings)
        player = EpisodePlayer(config, ModelInfo(self.tokenizer, 900, 900, config.max_turns, model_type), (self.end,))
        try:
            return prompts.join(player.play(prompts, self, seed=0))
        finally:
            player.close()

    def submit(self, rows: Batch, *, max_tokens: int) -> None:
        ids, count = self.replies[0], len(rows)
        del self.replies[: len(self.replies) > 1]
        assert len(ids) <= max_tokens
        self.prompts += [str(self.tokenizer.decode(ids)) for ids in rows.tokens("prompt_ids").rows()]
        replies = Batch.of(
            rows={"weight_version": torch.full((count,), 7), "truncated": torch.zeros(count, dtype=torch.bool)},
            tokens={
                "response_ids": Ragged.from_rows([ids] * count, torch.int64),
                "version_runs": Ragged.from_lengths(
                    torch.tensor([[7, 0]] * count), torch.ones(count, dtype=torch.int64)
                ),
                "rollout_logprobs": Ragged.from_rows([[-1.0] * len(ids)] * count, torch.float32),
            },
        )
        self._sampled.append(rows.only(["uid", "sample_index"]).join(replies))

    def poll(self) -> Batch:
        sampled, self._sampled = Batch.concat(self._sampled), []
        return sampled

    def withdraw(self, rows: Batch | None = None) -> Batch:
        assert rows is None
        self._sampled.clear()
        return Batch({})


def conversations(texts: list[str], *, samples: int = 1, **columns: list) -> Batch:
    """Messages of the user as a loader gives them; the uids begin at 5."""
    batch = Batch.of(
        rows={"uid": torch.arange(len(texts)) + 5},
        tokens={"prompt_ids": Ragged.from_rows([[5, 6]] * len(texts), torch.int64)},
        objects={"prompt": [[{"role": "user", "content": text}] for text in texts]},
    )
    return batch.repeat(samples).with_columns(objects=columns)


def prompts_of(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, samples: int = 1, **columns: list) -> Batch:
    """Texts as a loader gives them; the uids begin at 5."""
    ids = Ragged.from_rows([tokenizer.encode(text) for text in texts], torch.int64)
    batch = Batch.of(
        rows={"uid": torch.arange(len(texts)) + 5},
        tokens={"prompt_ids": ids},
        objects={"prompt": texts, **columns},
    )
    return batch.repeat(samples)
