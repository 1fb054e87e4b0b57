"""``python -m cp_plugin.cli.examples``: write ``train.sh`` and ``train.sbatch`` of every example anew."""

from __future__ import annotations

from cp_plugin.cli.examples.config import examples
from cp_plugin.cli.examples.scripts import SCRIPTS, rendered


def main() -> None:
    """Write them beside the configurations that they are rendered from."""
    for example in examples():
        for what in SCRIPTS:
            path = example.folder / f"train.{what}"
            path.write_text(rendered(example, what), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
