# For scripts that need an environment of their own beside .venv. In the folder of the repository: . ci/beside.sh NAME
#
# Makes .venv-NAME, which has all that .venv has; python is its interpreter. Options behind the name are those of venv.
bash ci/environment.sh dev
began=$SECONDS environment=".venv-$1" python="$PWD/.venv-$1/bin/python"
[ -x "$python" ] || .venv/bin/python -m venv "${@:2}" "$environment"
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
.venv/bin/python -c "$packages" >"$("$python" -c "$packages")/shared.pth"

outdated() { # FILE...: whether one of them has changed since something was installed into it
  local file
  for file; do
    [ "$environment/installed" -nt "$file" ] || return 0
  done
  return 1
}

pip_install() { # its arguments
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

install() { # the same, after which it is up to date
  pip_install "$@"
  touch "$environment/installed"
}

extras() { # EXTRA...: what these extras of the project ask for, one a line
  .venv/bin/python - "$@" <<'PY'
import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(wanted for name in sys.argv[1:] for wanted in extras[name]), sep="\n")
PY
}

run_tests() { # pytest's arguments
  PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 "$python" -m pytest "$@"
  echo "ci/$(basename "$0"): $((SECONDS - began)) s"
}
