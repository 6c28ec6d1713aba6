"""`python -m hybridflow COMMAND`: the same as `hybridflow COMMAND`."""

from hybridflow.cli.main import command

if __name__ == "__main__":
    command()
