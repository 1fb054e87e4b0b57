"""``python -m cp_plugin.tools``: the ``cp-plugin`` command."""

from cp_plugin.tools.app import app

app()
