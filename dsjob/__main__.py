"""`python -m dsjob`: the same as the `dsjob` command."""

import sys

from dsjob.cli import main

sys.exit(main())
