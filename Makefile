PYTHON ?= python3
VENV := .venv
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
SET := $(if $(filter-out 0,$(GPUS)),gpu,cpu)
NPROC ?= $(if $(filter gpu,$(SET)),$(GPUS),2)
ROUNDS ?= 5
# More than two cores can run at once: tests wait for timeouts, signals and other ranks.
WORKERS ?= $(if $(filter gpu,$(SET)),2,3)
PINS := requirements/$(SET).txt
INSTALLED := $(VENV)/.installed-$(SET)
# pip compiles what it installs: where PYTHONDONTWRITEBYTECODE is set, every process would compile its imports anew.
PIP := $(VENV)/bin/pip --disable-pip-version-check install
START := $(shell date +%s)
STEP := @.ci/step
INSTALL := $(MAKE) --no-print-directory install
export OMP_NUM_THREADS ?= 1

.PHONY: help bench submission yambda test format install clean

help:  ## List these targets
	@echo "make TARGET [PYTHON=python3.12] [NPROC=processes] [ROUNDS=rounds of the ladder] [WORKERS=test processes]"
	@sed -nE 's/^([a-z]+):.*  ## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

bench:  ## First minutes: install, make data, train to a target, compare three pipelines. ARGS='--seed 1' go to training
	$(STEP) "[1/4] install: the pinned packages of $(PINS) into $(VENV)" $(INSTALL)
	$(STEP) "[2/4] data: a small data set of known best AUC, in the real file formats" \
		$(VENV)/bin/dlrm-bench data generate --preset smoke data/smoke
	$(STEP) "[3/4] train: tiny tables on $(NPROC) processes until the AUC target (a minute), then MLPerf's log checker" \
		$(VENV)/bin/torchrun --nproc_per_node $(NPROC) launch/dlrm.py --preset smoke $(ARGS)
	$(STEP) "[4/4] ladder: three pipelines, $(ROUNDS) short runs of each, in turn (a minute or two, longer beside other load)" \
		$(VENV)/bin/dlrm-bench ladder --rungs cpu --rounds $(ROUNDS) --nproc $(NPROC) --preset smoke --target-auc None \
		--iterations 150
	@echo; $(VENV)/bin/python -m dlrm_bench.bench.ladder.verdict results
	@echo; echo "make bench: four steps in $$(($$(date +%s) - $(START))) s. Records are in results/, one folder a run."

SUBMISSION := data/submission
SMALL := --preset smoke --table-scale 0.1

submission:  ## From raw days to a checked and scored MLPerf package: made data, ten runs. ARGS='--mlperf.org you' go to them
	$(STEP) "[1/6] install: the pinned packages of $(PINS) into $(VENV)" $(INSTALL)
	$(STEP) "[2/6] raw days: made ones in Criteo's format, of known best AUC" $(VENV)/bin/dlrm-bench data generate \
		$(SMALL) --raw tsv $(SUBMISSION)/raw --days 3 --samples-per-day 25000 --skew 2.0
	$(STEP) "[3/6] preprocess: to MLPerf's files, as for Criteo's own days; then every byte is checked" sh -c \
		'$(VENV)/bin/dlrm-bench data preprocess $(SUBMISSION)/raw $(SUBMISSION)/days $(SMALL) && \
		$(VENV)/bin/dlrm-bench data check $(SUBMISSION)/days'
	$(STEP) "[4/6] build: ten runs to the target on $(NPROC) processes (a minute or two), and the package" \
		$(VENV)/bin/dlrm-bench submission build $(SUBMISSION)/package --records $(SUBMISSION)/runs --nproc $(NPROC) \
		--preset smoke --model.table-scale 0.1 --data.path $(SUBMISSION)/days --data.train-days 2 --local-batch-size 128 \
		--optimizer.learning-rate 0.03 --warmup-iterations 5 --target-auc 0.78 $(ARGS)
	$(STEP) "[5/6] check: MLPerf's checkers over the package" $(VENV)/bin/dlrm-bench submission check $(SUBMISSION)/package
	$(STEP) "[6/6] score" $(VENV)/bin/dlrm-bench submission score $(SUBMISSION)/package
	@echo; echo "make submission: six steps in $$(($$(date +%s) - $(START))) s. Everything is in $(SUBMISSION)."

YAMBDA := data/yambda-submission
SMALLER := --preset smoke-dlrmv4

yambda:  ## The same for DLRMv4: from made parquet like Yambda's to a checked and scored package. ARGS='--mlperf.org you' go to the runs
	$(STEP) "[1/6] install: the pinned packages of $(PINS) into $(VENV)" $(INSTALL)
	$(STEP) "[2/6] parquet: made days of listening in Yambda's format, of known best AUC" \
		$(VENV)/bin/dlrm-bench data generate $(SMALLER) $(YAMBDA)/made --last-day 0.25 --raw
	$(STEP) "[3/6] preprocess: to the reference's cache, as for Yambda's own file; then every event is checked" sh -c \
		'$(VENV)/bin/dlrm-bench data preprocess $(SMALLER) $(YAMBDA)/made $(YAMBDA)/days && \
		$(VENV)/bin/dlrm-bench data check $(SMALLER) $(YAMBDA)/days'
	$(STEP) "[4/6] build: ten runs to AUC 0.75 on $(NPROC) processes (some minutes), and the package" \
		$(VENV)/bin/dlrm-bench submission build $(YAMBDA)/package --records $(YAMBDA)/runs --nproc $(NPROC) \
		$(SMALLER) --data.path $(YAMBDA)/days --warmup-iterations 20 $(ARGS)
	$(STEP) "[5/6] check: MLPerf's checkers, ruleset 6.1.0, which takes the numbers of samples of MLPerf's own data alone" \
		$(VENV)/bin/dlrm-bench submission check $(YAMBDA)/package --made-data
	$(STEP) "[6/6] score" $(VENV)/bin/dlrm-bench submission score $(YAMBDA)/package
	@echo; echo "make yambda: six steps in $$(($$(date +%s) - $(START))) s. Everything is in $(YAMBDA)."

# Tests start a few hundred processes: they keep what Python compiles (env -u), as pip does. glibc gives memory of freed
# tensors back to the kernel, which clears it for the next ones: with these thresholds processes keep it.
MALLOC := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
test:  ## Install, check style and types, run the tests. ARGS go to pytest: --slow for all tests, '-k ladder' for some
	$(STEP) "[1/5] install: the pinned packages of $(PINS) into $(VENV)" $(INSTALL)
	$(STEP) "[2/5] ruff check: style" $(VENV)/bin/ruff check .
	$(STEP) "[3/5] ruff format: layout" $(VENV)/bin/ruff format --check .
	$(STEP) "[4/5] mypy: types" $(VENV)/bin/mypy
	$(STEP) "[5/5] pytest: the tests, in $(WORKERS) processes" \
		env -u PYTHONDONTWRITEBYTECODE $(MALLOC) $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
		--no-loadscope-reorder $(ARGS)
	@echo; echo "make test: five steps in $$(($$(date +%s) - $(START))) s"

format: install  ## Mend style and layout
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(INSTALLED)  ## Install the pinned packages into .venv, for GPUs if this machine has one
	@echo "$(VENV) holds what $(PINS) lists"

# Everything but torch goes in without its dependencies: see the head of the pin file. setuptools, which torch asks for,
# builds this package too: nothing is downloaded for that.
$(INSTALLED): $(PINS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "error: no venv module: run 'apt-get install python3-venv' and try again"; exit 1; }
	@echo "About 0.6 GB to download for CPUs, 2.2 GB on disk, some minutes; several times as much for GPUs, with CUDA."
	$(PYTHON) -m venv $(VENV)
	@echo "(1 of 3) torch and what it needs"
	$(PIP) $$(grep -E '^(torch|setuptools)==' $(PINS))
	@echo "(2 of 3) $$(grep -c == $(PINS)) packages"
	$(PIP) --no-deps --requirement $(PINS)
	@# CPU builds of torch bring no Triton; its interpreter runs the kernels' tests.
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || { echo "(3 of 3) Triton"; $(PIP) --no-deps triton==3.6.0; }
	$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:  ## Remove .venv, the data set, caches and build folders; records in results/ stay
	rm -rf $(VENV) data/smoke $(SUBMISSION) $(YAMBDA) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find bench pipeline \( -type d -name build -o -name '*.egg-info' \) -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
