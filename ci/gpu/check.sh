#!/usr/bin/env bash
# Check the plugin on a GPU machine: correctness, memory, speed; what teaches most comes first.
# Usage: ci/gpu/check.sh [--seconds N] [--from STEP] [--only "STEP ..."] [--wheels DIR | --pack DIR] [--tune] [--smoke] [--out DIR]
#   --seconds  end within N seconds: 540 is enough for a page; the output names the --from with which another call continues
#   --from     continue with this step: the results of earlier steps in --out stay on the page
#   --only     these steps; ci/gpu/plan.py has the list, in order, with the time limit of each
#   --wheels   a folder made by ci/gpu/wheels.sh: packages of Megatron's training and fla, used if not installed
#   --pack     a folder made by ci/gpu/pack.sh: those wheels, and our kernels already compiled
#   --tune     also search better block sizes for our kernels
#   --smoke    the same on a CPU with tiny shapes and Gloo, to test the check itself
#   --out      for check.json (everything), page.md (made from it), check.log and traces; default out/gpu
# Needs only PYTHON (default python3, 3.12 or newer) with torch and triton: what is missing is named on the page. COMMIT
# identifies the tree without git. Exit status 1 if anything is wrong; what is slow or could not run is not wrong.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/plan.py" "$@"
