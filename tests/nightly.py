"""What a night has time for, and not every change."""

from __future__ import annotations

import os

import pytest

nightly = pytest.mark.skipif(
    os.environ.get("CP_PLUGIN_NIGHTLY") != "1", reason="too long for every change: ci/nightly.sh ranks64"
)
"""A longer form of a test that every change runs shorter; with ``CP_PLUGIN_NIGHTLY=1`` it runs."""
