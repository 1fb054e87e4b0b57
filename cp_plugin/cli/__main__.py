"""``python -m cp_plugin.cli``: the ``cp-plugin`` command."""

from cp_plugin.cli.app import app

app()
