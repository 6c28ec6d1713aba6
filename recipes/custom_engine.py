"""A rollout engine of your own: the policy's `generate` of transformers, in place of hybridflow's decoding loop.

Question:  how does a run sample with another program than the transformers and vllm engines?
Hardware:  2 CPU cores.
Minutes:   1.
Command:   hybridflow grpo rollout.engine=custom_engine.py:GenerateEngine   (the path of this file)
Expect:    the metrics of rollout.engine=transformers with other samples; training/rollout_logprobs_diff_max below 1e-5.

Each rank of the run makes an engine, and calls `respond` with its share of the prompts. The trained weights are written
to the parameters of the model that is passed to `CustomEngine.__init__`, before the next `respond`.
"""

import argparse
from typing import Any

import torch
from transformers import GenerationConfig

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.custom import CustomEngine, CustomEngineSetup, Response
from hybridflow.engines.rollout.shell import ends_of


class GenerateEngine(CustomEngine):
    """Samples with `PreTrainedModel.generate`."""

    def __init__(self, setup: CustomEngineSetup) -> None:
        self.policy = setup.load_model()
        super().__init__(setup, self.policy)

    @torch.no_grad()
    def respond(
        self, prompts: list[list[int]], sampling: Sampling, *, max_response_tokens: int, seeds: list[int]
    ) -> list[Response]:
        """Responses that end with one of the ends of `sampling`, or are cut off."""
        ends, tokenizer = ends_of(sampling, self.setup.eos_token_ids), self.setup.tokenizer
        config = GenerationConfig(
            max_new_tokens=max_response_tokens,
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
            stop_strings=list(sampling.stop) or None,
            output_scores=True,
            return_dict_in_generate=True,
        )
        policy: Any = self.policy  # type checkers do not find `generate`
        width = max(map(len, prompts))
        padded = torch.tensor([[ends[0]] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.random.fork_rng():
            torch.manual_seed(seeds[0])
            found = policy.generate(
                inputs=padded.to(self.setup.device),
                attention_mask=mask.to(self.setup.device),
                generation_config=config,
                tokenizer=tokenizer,
            )
        tokens = found.sequences[:, width:].cpu()
        # `scores` are the logits after the temperature and the restriction to top-k and top-p.
        logprobs = torch.stack(found.scores, 1).float().log_softmax(-1).cpu()
        drawn = logprobs.gather(-1, tokens[..., None])[..., 0]
        responses = []
        for row, chances in zip(tokens.tolist(), drawn.tolist(), strict=True):
            end = next((n for n, token in enumerate(row, start=1) if token in ends), len(row))
            text = tokenizer.decode(row[:end])
            has_ended = row[end - 1] in ends or any(stop in text for stop in sampling.stop)
            responses.append(Response(row[:end], chances[:end], is_cut_off=not has_ended))
        return responses


def main() -> None:
    """Prints how `hybridflow grpo` samples with the class in this file."""
    usage = f"hybridflow grpo rollout.engine={__file__}:{GenerateEngine.__name__} [key=value ...]"
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
