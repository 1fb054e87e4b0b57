"""``python -m cp_plugin.cli``, as ``cp-plugin``."""

from cp_plugin.cli.app import app

app()
