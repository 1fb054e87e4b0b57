"""What a night has time for, and not every change."""

from __future__ import annotations

import os

import pytest

NIGHT = os.environ.get("CP_PLUGIN_NIGHTLY") == "1"
WHY = "too long for every change: ci/nightly.sh"
nightly = pytest.mark.skipif(not NIGHT, reason=WHY)
"""A longer form of a test that every change runs shorter; with ``CP_PLUGIN_NIGHTLY=1`` it runs."""
