"""Launch pretrain.py through NeMo-Run: on this machine, or on a Slurm cluster.

python examples/nemo/recipe.py --dry-run                                                    # show what would run
python examples/nemo/recipe.py --nodes 16 --per-node 4 --account me --partition gpu -- --context-parallel-size 64 \
    --provider attention2d --grid 8x8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("pretrain.py")


def options() -> argparse.Namespace:
    """Parse the command line; words after ``--`` are for pretrain.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--per-node", type=int, default=8, help="GPUs, and ranks, of a node")
    parser.add_argument("--account", help="Slurm account; default: start the ranks here")
    parser.add_argument("--partition")
    parser.add_argument("--time", default="04:00:00")
    parser.add_argument("--image", help="container with Bridge and cp_plugin")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("words", nargs="*", help="for pretrain.py, after --")
    return parser.parse_args()


def executor(run: Any, args: argparse.Namespace) -> Any:
    """Make the executor: torchrun starts a rank per GPU."""
    per_node = {"nodes": args.nodes, "ntasks_per_node": args.per_node, "launcher": "torchrun"}
    if args.account is None:
        return run.LocalExecutor(**per_node)
    return run.SlurmExecutor(
        **per_node,
        account=args.account,
        partition=args.partition,
        gpus_per_node=args.per_node,
        time=args.time,
        container_image=args.image,
        tunnel=run.LocalTunnel(job_dir=str(Path.cwd() / "nemo_run")),
    )


def main() -> int:
    """Launch; return the exit status."""
    args = options()
    try:
        import nemo_run as run
    except ModuleNotFoundError as error:
        if error.name != "nemo_run":
            raise
        print("error: this needs NeMo-Run: pip install nemo_run", file=sys.stderr)
        return 2
    words = args.words or ["--context-parallel-size", str(args.nodes * args.per_node), "--provider", "auto"]
    script = run.Script(path=str(SCRIPT), entrypoint="python", args=words)
    run.run(script, executor=executor(run, args), name="cp-plugin-pretrain", dryrun=args.dry_run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
