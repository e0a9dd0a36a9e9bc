# make demo sets everything up by itself. In a fresh clone, make setup PYTHON=python3.12 picks
# another interpreter and make setup DISTRO=kilted the wheels of another ROS 2 than Jazzy.
PYTHON ?= python3
DISTRO = jazzy
VENV := .venv
SET_UP := $(VENV)/.set-up
TORCH := $(VENV)/.torch
CUDA := $(VENV)/.cuda

# A sourced ROS 2 installation belongs to another Python and must not leak into the wheels.
unexport PYTHONPATH AMENT_PREFIX_PATH _ROS_WHEELS_BOOTSTRAP_COMPLETE
# More threads make the small matrices of the default policy slower, up to 85 times when busy.
export OMP_NUM_THREADS ?= 1
export NUMBA_NUM_THREADS ?= 1

.PHONY: setup demo test parity kernels clean

setup: $(SET_UP)

$(SET_UP): setup.py pyproject.toml requirements/bootstrap.sh requirements/cuda_extra.py \
    requirements/constraints.txt requirements/$(DISTRO).txt
	PYTHON=$(PYTHON) DISTRO=$(DISTRO) requirements/bootstrap.sh $(VENV)
	@touch $@

$(TORCH): $(SET_UP)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check \
	    --constraint requirements/constraints.txt torch
	@touch $@

# The compiler alone: no GPU is needed. That of CUDA 12 knows fewer processors and tells no spills.
$(CUDA): $(SET_UP)
	@test "$$($(VENV)/bin/python requirements/cuda_extra.py 2> /dev/null)" != cuda12 || { \
	    echo 'kernels: needs the compiler of CUDA 13, which would replace the one of CUDA 12' \
	        "that this machine's driver needs" >&2; exit 1; }
	$(VENV)/bin/pip install --quiet --disable-pip-version-check \
	    --constraint requirements/constraints.txt --editable '.[cuda]'
	@touch $@

demo: $(SET_UP)
	$(VENV)/bin/vla-edge demo

test: $(SET_UP)
	$(VENV)/bin/python -m pytest

parity: $(TORCH)
	$(VENV)/bin/vla-edge parity
	$(VENV)/bin/python -m pytest test/test_training.py test/test_parity.py

kernels: $(CUDA)
	$(VENV)/bin/python -m vla_edge_ros.lab.kernel_table
	$(VENV)/bin/python -m pytest test/test_cuda_program.py test/test_cuda_emulated.py

clean:
	rm -rf build install log out
