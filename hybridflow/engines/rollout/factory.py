"""Makes rollout engines by name; an engine that is not chosen is never imported."""

import logging

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.config.choices import is_own
from hybridflow.config.model import Model
from hybridflow.config.rollout import DEFAULT_SEQUENCES, Rollout, RolloutKind
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.engines.traits import rollout_traits
from hybridflow.models.loading import load_causal_lm, resolve_model_path, torch_dtype
from hybridflow.parallel.groups import Ranks
from hybridflow.process import uncollected

logger = logging.getLogger(__name__)


def make_rollout_engine(
    model: Model,
    rollout: Rollout,
    *,
    limit_tokens: int,
    eos_token_ids: tuple[int, ...],
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: torch.device,
    ranks: Ranks | None = None,
    reads_weights: bool = True,
) -> RolloutEngine:
    """An engine with the weights in `model.path`; a response ends after one of `eos_token_ids`.

    Prompt and response have at most `limit_tokens` together. Stop strings (`Sampling.stop`) need the `tokenizer`.

    `ranks` is this process's rank in the generation mesh, with the axes `data`, `pipeline` and `tensor`: ranks that
    differ only in `tensor` or `pipeline` hold one replica together, and each makes an engine. None means a single
    process. With `reads_weights=False` an engine may skip reading the weights, for a trainer that writes every slot;
    `generate` then raises until `resume`.
    """
    ranks = ranks or Ranks.alone()
    directory = resolve_model_path(str(model.path))
    rollout_traits(rollout.engine).check_installed()
    if rollout.engine is not None and is_own(rollout.engine):
        from hybridflow.engines.rollout.custom import CustomEngineSetup, custom_engine

        assert tokenizer is not None, "an engine of the user's own gets the tokenizer"
        setup = CustomEngineSetup(directory, model, rollout, limit_tokens, eos_token_ids, tokenizer, device, ranks)
        return custom_engine(rollout.engine)(setup)
    if rollout.engine == RolloutKind.vllm:
        from hybridflow.engines.rollout.vllm.environment import import_vllm

        logger.info("rollout.engine=vllm: vLLM is imported and starts, which takes seconds ...")
        with uncollected():
            import_vllm(device)
            from hybridflow.engines.rollout.vllm.engine import VllmEngine

        return VllmEngine(
            model,
            rollout,
            limit_tokens=limit_tokens,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            device=device,
            ranks=ranks,
            reads_weights=reads_weights,
        )
    from hybridflow.engines.rollout.transformers.engine import TransformersEngine

    return TransformersEngine(
        load_causal_lm(
            directory, dtype=torch_dtype(model.dtype), device=device, trust_remote_code=model.trust_remote_code
        ),
        max_sequences=rollout.max_sequences or DEFAULT_SEQUENCES,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        mesh=ranks.mesh,
    )
