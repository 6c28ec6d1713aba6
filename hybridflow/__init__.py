"""hybridflow: reinforcement-learning post-training of language models, after the HybridFlow paper (arXiv:2409.19256).

Read first: `dataflows/ppo.py`, `dataflows/loop.py`, `controller/worker_group.py`, `workers/actor.py`,
`config/experiment.py`, `launch/assemble.py`.
"""

__version__ = "0.1.0"
