"""The built-in reward functions; `rewards/factory.py` gives them their names."""
