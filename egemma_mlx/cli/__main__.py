"""`python -m egemma_mlx.cli`, for where the command itself is not installed."""

import sys

from egemma_mlx.cli import main

sys.exit(main())
