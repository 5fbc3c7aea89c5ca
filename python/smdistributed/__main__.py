"""`python -m smdistributed` is `smdrun`."""

import sys

from smdistributed._launch import smdrun

sys.exit(smdrun())
