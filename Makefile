# make bench: install, make a small data set, train it to its target, check the log, run a ladder of three pipelines.
# make test: install, run the tests.
PYTHON ?= python3
VENV := .venv
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
SET := $(if $(filter-out 0,$(GPUS)),gpu,cpu)
NPROC ?= $(if $(filter gpu,$(SET)),$(GPUS),2)
PINS := requirements/$(SET).txt
INSTALLED := $(VENV)/.installed-$(SET)
export OMP_NUM_THREADS ?= 1

.PHONY: bench test format clean

bench: $(INSTALLED) data/smoke/manifest.json
	$(VENV)/bin/torchrun --nproc_per_node $(NPROC) launch/dlrm.py --preset smoke $(ARGS)
	$(VENV)/bin/dlrm-bench ladder --rungs cpu --rounds 1 --nproc $(NPROC) --preset smoke --target-auc None --iterations 150

data/smoke/manifest.json: | $(INSTALLED)
	$(VENV)/bin/python -m dlrm_bench.dlrm.data.planted --preset smoke --path data/smoke

test: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest $(ARGS)

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Everything but torch goes in without its dependencies: see the head of the pin file.
$(INSTALLED): $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "error: no venv module: run 'apt-get install python3-venv' and try again"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $$(grep '^torch==' $(PINS))
	$(VENV)/bin/pip install --quiet --no-deps --requirement $(PINS)
	# CPU builds of torch bring no Triton; its interpreter runs the kernels' tests.
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(VENV)/bin/pip install --quiet --no-deps triton==3.6.0
	$(VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) data/smoke
