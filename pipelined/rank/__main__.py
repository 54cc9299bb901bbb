"""`python -m pipelined.rank`: a rank from a description, started by a supervisor."""

import os
import sys

from pipelined.rank.process import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # daemon threads of native libraries must not hold up a finished rank
