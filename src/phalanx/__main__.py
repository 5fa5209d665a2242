"""Run `phalanx` as `python -m phalanx`, also if the scripts folder is not on the path."""

import sys

from phalanx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
