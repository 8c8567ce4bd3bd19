"""`python -m ling3` is `ling3`."""

import sys

from ling3.cli import process

if __name__ == "__main__":
    sys.exit(process())
