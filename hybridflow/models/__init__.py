"""Hugging Face models and what we know about them. Read `loading.py` first.

`loading` finds, reads and writes models; `heads` computes hidden states, logits and values; `tokenizers` checks and
decodes. `geometry` knows a model's sizes without torch, so this file imports nothing.
"""
