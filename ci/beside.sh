# Sourced by scripts that need their own environment, from the root of the repository: . ci/beside.sh NAME [OPTIONS OF VENV]
#
# Creates .venv-NAME, which sees the packages of .venv; $python is its interpreter.
bash ci/environment.sh dev
began=$SECONDS environment=".venv-$1" python="$PWD/.venv-$1/bin/python"
[ -x "$python" ] || .venv/bin/python -m venv "${@:2}" "$environment"
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
shared="$(.venv/bin/python -c "$packages")"
{ echo "$shared" && cat "$shared/repository.pth"; } >"$("$python" -c "$packages")/shared.pth"

outdated() { # FILE...: whether one of them has changed since the last install
  local file
  for file; do
    [ "$environment/installed" -nt "$file" ] || return 0
  done
  return 1
}

pip_install() { # ARGUMENTS OF PIP...
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

install() { # ARGUMENTS OF PIP...: the same, and mark the environment as up to date
  pip_install "$@"
  touch "$environment/installed"
}

extras() { # EXTRA...: print the requirements of these extras of the project
  .venv/bin/python - "$@" <<'PY'
import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(wanted for name in sys.argv[1:] for wanted in extras[name]), sep="\n")
PY
}

run_tests() { # ARGUMENTS OF PYTEST...
  PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 "$python" -m pytest "$@"
  echo "ci/$(basename "$0"): $((SECONDS - began)) s"
}
