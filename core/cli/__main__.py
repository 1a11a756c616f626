"""``python -m bmoe.cli``: the command without its script."""

import sys

from bmoe.cli import main

sys.exit(main())
