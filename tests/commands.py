"""``cp-plugin`` in this process."""

from typer.testing import CliRunner, Result

from cp_plugin.tools.app import app


def cp_plugin(*words: object, columns: int = 100) -> Result:
    """Run a command line, in a terminal of this width."""
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": str(columns)})
