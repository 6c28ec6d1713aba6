"""A model alone, which samples responses and is not trained: `hybridflow evaluate` and `hybridflow generate`."""

from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Scorer
from hybridflow.observability.metrics import Metrics, summary


class Generate(Dataflow):
    """Samples responses.

    There is no actor, so the rollout reads the weights of `model.path` itself. With `trainer.total_steps=0` the run
    ends after the evaluation: responses to the prompts of `data.eval_files`.
    """

    rollout: Sampler

    @dataclass
    class Settings:
        """`dataflow_settings.*`, which `hybridflow generate` sets."""

        out: str = ""
        """File of the responses."""

        by_prompt: bool = False
        """Whether a row has all responses to a prompt."""

        token_ids: bool = False
        """Whether rows have the token ids of responses."""

    def step(self, prompts: Batch) -> Metrics:
        """Responses to the prompts of a step, and their lengths."""
        self.last_batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        return summary("response_length", self.last_batch.tokens_of("response_ids").tolist())


class Evaluate(Dataflow):
    """Samples responses and scores them, as `Generate` without an actor."""

    rollout: Sampler
    reward: Scorer

    def step(self, prompts: Batch) -> Metrics:
        """Responses to the prompts of a step, with their scores."""
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        return self.observe(self.reward.score(batch))
