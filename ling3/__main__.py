"""`python -m ling3` runs the command line `ling3`."""

import sys

from ling3.cli import process

if __name__ == "__main__":
    sys.exit(process())
