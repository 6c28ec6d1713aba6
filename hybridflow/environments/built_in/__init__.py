"""Environments that come with the package, small enough for a model that learns in minutes on a CPU."""
