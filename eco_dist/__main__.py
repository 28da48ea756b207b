"""Run the command line: ``python -m eco_dist``."""

import faulthandler
import sys

from eco_dist.cli import main

if __name__ == "__main__":
    faulthandler.enable()  # a rank that dies in native code says where, which no launcher can find out later
    sys.exit(main())
