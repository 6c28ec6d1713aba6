"""Hugging Face models: loading, saving, and what is known about their weights. Read `loading.py` first.

`loading` finds, reads and writes models; `heads` computes hidden states, logits and values; `tokenizers` checks
tokenizers and decodes. `geometry` reads a model's sizes without importing torch, so this file imports nothing.
"""
