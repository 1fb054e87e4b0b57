#!/usr/bin/env bash
# Create .venv with everything the project needs, in the pinned versions. Safe to call again.
# Usage: ci/environment.sh [EXTRA]     (default: dev)
set -euo pipefail
cd "$(dirname "$0")/.."
extra="${1:-dev}"
wanted="$(cat .python-version)"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" "python$wanted" python3 "$HOME"/.pyenv/versions/"$wanted".*/bin/python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, '$wanted'.split('.'))))" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python $wanted not found: install it, or set PYTHON=/path/to/python$wanted" >&2
  exit 1
}

if [ ! -x .venv/bin/python ]; then
  python="$(find_python)"
  echo "creating .venv with $("$python" --version)"
  "$python" -m venv .venv
fi
stamp=.venv/installed-$extra
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ ci/constraints.txt -nt "$stamp" ]; then
  echo "installing cp-plugin[$extra] and its dependencies (torch downloads several GB the first time)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e ".[$extra]"
  .venv/bin/python - <<'PY' # import what tests import
import pathlib, sysconfig, tomllib
folders = tomllib.load(open("pyproject.toml", "rb"))["tool"]["pytest"]["ini_options"]["pythonpath"]
known = pathlib.Path(sysconfig.get_paths()["purelib"], "repository.pth")
known.write_text("".join(f"{pathlib.Path(folder).resolve()}\n" for folder in folders))
PY
  touch "$stamp"
fi
