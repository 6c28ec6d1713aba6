"""hybridflow: reinforcement-learning post-training of language models, after the HybridFlow paper (arXiv:2409.19256).

From Python, start with `hybridflow.run`; the names below are imported when they are first used (for type checkers, see
`__init__.pyi`). To read the code, begin with `dataflows/ppo.py`, `dataflows/loop.py`, `controller/worker_group.py`,
`workers/actor.py`, `config/experiment.py`, `launch/assemble.py`.
"""

from hybridflow.lazy import lazy_names, names_with

__version__ = "0.1.0"

__places__ = {
    "run": "hybridflow.api.experiment",
    "plan": "hybridflow.api.experiment",
    "assemble": "hybridflow.api.experiment",
    "Experiment": "hybridflow.api.experiment",
    "Result": "hybridflow.api.result",
    "export": "hybridflow.api.result",
    "show": "hybridflow.api.drawing",
    "STOP": "hybridflow.api.callbacks",
    "HybridflowError": "hybridflow.errors",
}
__getattr__ = lazy_names(__name__, __places__)
__dir__ = names_with(__name__, __places__)
