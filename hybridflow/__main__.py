"""`python -m hybridflow COMMAND`: the same as `hybridflow COMMAND`."""

import sys

from hybridflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
