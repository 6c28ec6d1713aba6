"""Samples tokens by inverting the cumulative probabilities at one uniform number per row and position.

The numbers are hashes of (seed, uid, sample_index, position), so a row's samples depend neither on the other rows of
its batch nor on their order or the number of replicas. There is no generator state to save.
"""

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from hybridflow.config.rollout import Sampling

_UNIFORM_BITS = 52
_WORD = 1 << 64


def _signed(word: int) -> int:
    """An unsigned 64-bit word as the int64 with the same bits."""
    word %= _WORD
    return word - _WORD if word >= _WORD >> 1 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)


def row_keys(seed: int, uid: Int64[Tensor, " B"], sample_index: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """A 64-bit key per row: a hash of the seed, the prompt's uid and the sample index."""
    start = _mixed(torch.full_like(uid, _signed(seed)) + _STEP)
    return _mixed(_mixed(start + (uid + 1) * _STEP) + (sample_index + 1) * _STEP)


def uniform_draws(keys: Int64[Tensor, " B"], num_positions: int) -> Float64[Tensor, "B R"]:
    """Numbers in [0, 1) for the first `num_positions` response tokens of each row; see `uniforms_at`."""
    return uniforms_at(keys[:, None], torch.arange(num_positions))


def uniforms_at(keys: Int64[Tensor, "*B"], positions: Int64[Tensor, "*R"]) -> Float64[Tensor, "..."]:
    """Numbers in [0, 1), one per key and response position (from 0), which are broadcast against each other.

    The numbers of a key are the SplitMix64 sequence with that key as its seed (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014).
    """
    words = _mixed(keys + (positions + 1) * _STEP)
    return _shifted(words, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def draw(
    logits: Float[Tensor, "B V"], uniforms: Float64[Tensor, " B"], sampling: Sampling
) -> tuple[Int64[Tensor, " B"], Float32[Tensor, " B"]]:
    """One token per row, and its log-probability under the distribution it was drawn from.

    This is softmax(logits / temperature) in float32, restricted to top-k and top-p and renormalized if those are set.
    The token is the first whose cumulative probability exceeds the row's uniform number. At temperature 0 it is the
    most probable one, with its log-probability at temperature 1. A row whose logits are not finite gets an arbitrary
    token with log-probability NaN, which `response_batch` rejects later: checking here would synchronize with the
    device at every token.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1, keepdim=True)
    else:
        scaled = logits if sampling.temperature == 1.0 else logits / sampling.temperature
        logprobs = _restricted(scaled, sampling).log_softmax(-1)
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        # A uniform number has 52 bits, so the product stays below the total and never selects past the last token.
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)  # NaN is found past the last token
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _restricted(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits with all but the top k, and then the top p of those, set to -inf; ties are kept."""
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        is_out = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        is_out[:, -1] = False
        logits = logits.masked_fill(is_out.scatter(1, order, is_out), -torch.inf)
    return logits


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's output function; int64 arithmetic wraps around, as the algorithm requires."""
    words = (words ^ _shifted(words, 30)) * _FIRST_MULTIPLIER
    words = (words ^ _shifted(words, 27)) * _SECOND_MULTIPLIER
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical right shift; int64's own is arithmetic."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
