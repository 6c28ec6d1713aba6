"""The mathematics: tensors in, tensors out. No config, no device, no logging, no `.item()`.

Read first: `losses/policy.py`, `advantages/gae.py`, `aggregate.py`. `docs/equations.md` pairs each paper's equation
with its function. Shapes: B sequences, R response tokens, V vocabulary. Masks are 0/1 (float or bool) and mark the
tokens that the policy chose; finite numbers elsewhere change no result. Infinite ones and NaN change no value and no
gradient at tokens that count, but GSPO, CISPO and DPPO then have a NaN gradient at the masked tokens themselves.
Per-token tensors align with the token they describe; only `logprobs.py` knows that the logits of one position predict
the next token.
"""
