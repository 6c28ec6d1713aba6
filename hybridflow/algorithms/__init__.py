"""The mathematics, as functions of tensors. No config, no device, no logging, no `.item()`.

Read `losses/policy.py`, `advantages/gae.py` and `aggregate.py` first. `docs/equations.md` lists each paper's equation
with its function. Shapes: B sequences, R response tokens, V vocabulary. Masks are 0 or 1 (float or bool) and select the
tokens that the policy sampled. Finite numbers at masked tokens change no result. Infinity and NaN there change no value
or gradient at unmasked tokens, but GSPO, CISPO and DPPO then have a NaN gradient at the masked tokens themselves.
Per-token tensors align with the token they describe; only `logprobs.py` knows that the logits of one position predict
the next token.
"""
