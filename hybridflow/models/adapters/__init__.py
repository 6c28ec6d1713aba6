"""Low-rank adapters: a frozen model, and a small trained addition to some of its matrices.

Read `lora.py` first (what is added to a model), then `merging.py` (the weights that a rollout gets) and `files.py`
(adapters on disk, in peft's format).
"""
