"""`python -m cp_plugin.generate --load DIR --prompt TEXT [--nproc N]`: the `cp-plugin generate` command.

    python -m cp_plugin.generate --nproc 4 --load checkpoints --prompt "def main" --new-tokens 64 --cp-provider striped
    torchrun --nproc-per-node 8 -m cp_plugin.generate --load checkpoints --prompt "$(cat book.txt)" \\
        --cp-provider attention2d --chunk 32768
"""

from __future__ import annotations

import typer

from cp_plugin.cli.generate import EVERYTHING, generate

app = typer.Typer(add_completion=False)
app.command(context_settings=EVERYTHING)(generate)

if __name__ == "__main__":
    app()
