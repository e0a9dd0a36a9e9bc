#!/bin/sh
# Make the virtual environment $1 from the interpreter $PYTHON and install the package into it, with
# the wheels of the ROS 2 distribution $DISTRO.
set -eu
venv=$1
python=${PYTHON:-python3}
distro=${DISTRO:-jazzy}

fail() {
    echo "setup: $*" >&2
    exit 1
}

# Install Debian packages when we may; otherwise say what the user has to type.
apt_install() {
    command -v apt-get > /dev/null || return 1
    if [ "$(id -u)" = 0 ]; then
        as_root=
    elif sudo -n true 2> /dev/null; then
        as_root='sudo -n'
    else
        return 1
    fi
    echo "setup: installing $*"
    $as_root apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "$@" > /dev/null
}

case $distro in
jazzy) extra=ros ;;
*) extra=ros-$distro ;;
esac
command -v "$python" > /dev/null || fail "needs Python 3.10 to 3.13, there is no $python"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    fail "needs Python 3.10 to 3.13, $python is $("$python" --version 2>&1); try PYTHON=python3.12"
[ "$(uname -m)" = x86_64 ] ||
    fail "the ROS 2 wheels exist for x86_64 only; on $(uname -m) build with colcon (README)"

if ! [ -x "$venv/bin/pip" ]; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2> /dev/null || apt_install "python$version-venv" ||
        fail "needs the venv module: sudo apt-get install python$version-venv"
    "$python" -m venv "$venv"
fi
echo 'setup: installing the Python packages (some minutes the first time)'
"$venv/bin/pip" install --quiet --disable-pip-version-check --prefer-binary \
    --constraint requirements/constraints.txt --constraint "requirements/$distro.txt" \
    --editable ".[$extra,test]"
cuda=$("$venv/bin/python" requirements/cuda_extra.py)
if [ -n "$cuda" ]; then
    "$venv/bin/pip" install --quiet --disable-pip-version-check --prefer-binary \
        --constraint requirements/constraints.txt --editable ".[$cuda]"
fi

can_render() {
    MUJOCO_GL=egl "$venv/bin/python" -c \
        'import mujoco; mujoco.GLContext(64, 64).make_current()' > /dev/null 2>&1
}
gl_packages='libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri'
if ! can_render; then
    # shellcheck disable=SC2086
    apt_install $gl_packages && can_render ||
        echo "setup: the simulator cannot draw here: sudo apt-get install $gl_packages" >&2
fi
