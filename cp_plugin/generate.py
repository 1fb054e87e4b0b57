"""`python -m cp_plugin.generate --load DIR --prompt TEXT [--ranks N]`: the `cp-plugin generate` command.

    python -m cp_plugin.generate --ranks 4 --load checkpoints --prompt "def main" --new-tokens 64 --cp-provider striped
    torchrun --nproc-per-node 8 -m cp_plugin.generate --load checkpoints --prompt "$(cat book.txt)" \\
        --cp-provider attention2d --chunk 32768
"""

from __future__ import annotations

import sys

from cp_plugin.tools.app import app

if __name__ == "__main__":
    app(["generate", *sys.argv[1:]])
