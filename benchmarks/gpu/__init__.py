"""What gpu_check.py does. The truth is that of the tests: naive.py, and the models around it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "modeling_iha"))
