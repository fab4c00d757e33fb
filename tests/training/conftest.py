import sys
from pathlib import Path

# Programs that these tests start lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
