"""`python -m pipelined.serving`: the HTTP process, started by a supervisor."""

import os
import sys

from pipelined.serving.front import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # daemon threads of native libraries must not hold up what has ended
