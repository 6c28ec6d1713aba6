"""The vLLM rollout engine, in the processes of training. Read `engine.py`, then `start.py` and `weights.py`.

`limits.py`, `weights.py` and `environment.py` import without vLLM; what depends on its version is in `compat.py`.
"""
