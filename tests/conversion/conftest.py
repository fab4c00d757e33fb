import sys
from pathlib import Path

# Modules that these tests share lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
