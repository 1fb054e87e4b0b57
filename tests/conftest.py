"""Shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # `import oracle`

torch.set_num_threads(1)  # ranks are forked from this process, and OpenMP's pool does not survive a fork
