"""The simplest rollout engine: a decoding loop over a Hugging Face model. Read `engine.py`, then `decode.py`."""
