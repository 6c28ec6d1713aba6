"""The vLLM rollout engine, in this process. Read `engine.py`, then `weights.py`.

`limits.py` and `environment.py` import without vLLM; what depends on its version is in `compat.py`.
"""
