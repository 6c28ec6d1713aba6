"""The vLLM rollout engine, in the processes of training. Read `engine.py`, then `start.py` and `weights.py`.

`memory.py`, `weights.py` and `environment.py` do not import vLLM. `compat.py` has everything that depends
on its version. `engines/vllm_limits.py`, which is read before this package may be imported, lists what vLLM cannot run.
"""
