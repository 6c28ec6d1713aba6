"""The plain rollout engine: our own decoding loop over a Hugging Face model. Read `engine.py`, then `decode.py`."""
