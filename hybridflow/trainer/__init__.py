"""Modules for launchers: `python -m hybridflow.trainer.main_ppo` is `hybridflow ppo`, and so on."""
