"""`python -m millpond.compare`."""

import sys

from .cli import main

sys.exit(main())
