#!/usr/bin/env bash
# Check the plugin on a GPU machine: correctness, memory, speed; the most informative steps come first.
# Usage: ci/gpu/check.sh [--seconds N] [--from STEP] [--only "STEP ..."] [--wheels DIR | --pack DIR] [--smoke] [--out DIR]
#   --seconds  stop within N seconds (540 is enough for a page); the output names the --from that continues in another run
#   --from     continue with this step; results of earlier steps in --out stay on the page
#   --only     run only these steps; ci/gpu/plan.py lists them in order, with their time limits
#   --wheels   a folder made by ci/gpu/wheels.sh: the packages for Megatron training and fla, used if not installed
#   --pack     a folder made by ci/gpu/pack.sh: those wheels, and our kernels precompiled
#   --smoke    run on a CPU with tiny shapes and Gloo, to test the check itself
#   --out      folder for check.json (everything), page.md (made from it), check.log and traces; default: out/gpu
# Needs only PYTHON (default: python3, 3.12 or newer) with torch and triton; the page names what else is missing. COMMIT
# identifies the tree without git. Exit status 1 if anything is wrong; being slow or unable to run is not wrong.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/plan.py" "$@"
