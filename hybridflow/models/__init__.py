"""Hugging Face models and what we know about them. Read `loading.py` first.

`loading` finds, reads and writes them; `heads` gives hidden states, logits and values; `tokenizers` checks and decodes;
`geometry` and `accounting` know sizes and costs without torch, so this file imports nothing.
"""
