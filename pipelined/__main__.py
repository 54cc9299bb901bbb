"""`python -m pipelined`."""

import sys

from pipelined.cli import main

if __name__ == "__main__":
    sys.exit(main())
