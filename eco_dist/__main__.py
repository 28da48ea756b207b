"""``python -m eco_dist`` is ``eco-dist``."""

import sys

from eco_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
