"""`python -m ed_esurge`: see `ed_esurge.command.main`."""

import sys

from ed_esurge.command.main import main

if __name__ == "__main__":
    sys.exit(main())
