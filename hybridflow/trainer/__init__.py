"""The commands: `python -m hybridflow.trainer.main_ppo` and `main_sft`."""
