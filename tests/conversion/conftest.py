import sys
from pathlib import Path

# The tests' own helpers are modules beside them.
sys.path.insert(0, str(Path(__file__).parent))
