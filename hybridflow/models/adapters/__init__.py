"""LoRA adapters: small trained updates to some matrices of a frozen model.

Read `lora.py` first (what an adapter adds to a model), then `merging.py` (the weights that a rollout gets) and
`files.py` (adapters on disk, in peft's format).
"""
