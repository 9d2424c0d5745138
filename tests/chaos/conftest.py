"""The suite of faults uses the helpers of the deployment's tests."""

import sys
from pathlib import Path

for folder in ("deploy", "chaos", "chaos/inside"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
