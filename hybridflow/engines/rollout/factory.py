"""Makes rollout engines by name; an engine that is not chosen is never imported."""

import torch

from hybridflow.config.model import Model
from hybridflow.config.rollout import DEFAULT_SEQUENCES, Rollout, RolloutKind
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.engines.traits import ROLLOUT_ENGINES
from hybridflow.models.loading import load_causal_lm, resolve_model_path, torch_dtype
from hybridflow.parallel.groups import Ranks


def make_rollout_engine(
    model: Model,
    rollout: Rollout,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    eos_token_ids: tuple[int, ...],
    device: torch.device,
    ranks: Ranks | None = None,
    reads_weights: bool = True,
) -> RolloutEngine:
    """An engine with the weights in `model.path`; a response ends after one of `eos_token_ids`.

    `ranks` is this process's rank in the generation mesh, with the axes `data`, `pipeline` and `tensor`: ranks that
    differ only in `tensor` or `pipeline` hold one replica together, and each makes an engine. None means a single
    process. With `reads_weights=False` an engine may skip reading the weights, for a trainer that writes every slot;
    `generate` then raises until `weights_changed`.
    """
    ranks = ranks or Ranks.alone()
    directory = resolve_model_path(str(model.path))
    ROLLOUT_ENGINES[rollout.engine or RolloutKind.transformers].check_installed()
    if rollout.engine is RolloutKind.vllm:
        from hybridflow.engines.rollout.vllm.environment import import_vllm

        import_vllm(device)
        from hybridflow.engines.rollout.vllm.engine import VllmEngine

        return VllmEngine(
            directory,
            model,
            rollout,
            limit_tokens=max_prompt_tokens + max_response_tokens,
            eos_token_ids=eos_token_ids,
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
        mesh=ranks.mesh,
    )
