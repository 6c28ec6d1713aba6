"""Drawing a token the obvious way: Python integers for the hash, a loop over sorted tokens for top-k and top-p."""

import math
from collections.abc import Sequence

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix(word: int) -> int:
    """SplitMix64's output for a state, as in its authors' C code."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, uid: int, sample_index: int, position: int) -> float:
    """The number that a row draws with at a position of its response."""
    state = splitmix((seed + _GAMMA) & _MASK)
    for number in (uid, sample_index):
        state = splitmix((state + (number + 1) * _GAMMA) & _MASK)
    return (splitmix((state + (position + 1) * _GAMMA) & _MASK) >> 12) / 2**52


def distribution(logits: Sequence[float], *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """softmax(logits / temperature) over the k most probable tokens, then over the fewest of those that make up p."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    total = sum(weights[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if reached >= top_p:
            break
        nucleus.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]
