"""The mathematics: tensors in, tensors out. No config, no device, no logging, no `.item()`.

Read first: `losses/policy.py`, `advantages/gae.py`, `aggregate.py`. `docs/equations.md` pairs each paper's equation
with its function. Shapes: B sequences, R response tokens, V vocabulary. Masks are 0/1 (float or bool) and mark the
tokens that the policy chose; finite numbers elsewhere change no result. Infinite ones and NaN change no value and no
gradient at tokens that count, but GSPO, CISPO and DPPO then have a NaN gradient at the masked tokens themselves.
Per-token tensors align with the token they describe; only `logprobs.py` knows that the logits of one position predict
the next token.
"""

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.group_relative import group_relative
from hybridflow.algorithms.aggregate import aggregate
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.kl_controller import AdaptiveKL, FixedKL, KLController
from hybridflow.algorithms.logprobs import logprobs_and_entropy, token_logprobs
from hybridflow.algorithms.losses.policy import clipped_surrogate
from hybridflow.algorithms.losses.supervised import negative_log_likelihood
from hybridflow.algorithms.losses.value import clipped_value_loss
from hybridflow.algorithms.masked import masked_mean, masked_sum, masked_whiten
from hybridflow.algorithms.shaping import token_rewards

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "KLController",
    "aggregate",
    "clipped_surrogate",
    "clipped_value_loss",
    "gae",
    "group_relative",
    "kl_divergence",
    "logprobs_and_entropy",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "negative_log_likelihood",
    "token_logprobs",
    "token_rewards",
]
