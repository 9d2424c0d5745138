"""Python runs this in every program that has this folder in PYTHONPATH: faults come from `faults`
in the folder in which the program was started.
"""

from pathlib import Path

import faults

here = Path.cwd()
if (here / "faults").is_dir():
    faults.shift_clock(here / "faults")
    faults.Disk(here, here / "faults")
