from __future__ import annotations

import sys
from pathlib import Path

# Child processes import the stages of these tests by the name of their module.
sys.path.insert(0, str(Path(__file__).parent))
