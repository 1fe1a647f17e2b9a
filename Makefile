# make train, make test: all that a fresh machine needs beforehand is Python 3.11 or newer.
# ARGS="..." is handed on: make train ARGS="--config configs/X.yaml train.beta=0.2"

# What MLX computes on: cpu (Linux), metal (macOS) or cuda. As installed, else by the system: make setup EXTRA=cuda
EXTRA ?= $(or $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*)),$(if $(filter Darwin,$(shell uname)),metal,cpu))
INSTALLED = .venv/installed-$(EXTRA)
BIN = .venv/bin
# What ssh starts on a Mac has none of a person's PATH, and python3 there is Apple's 3.9: also look where Homebrew and
# python.org put theirs. SYSTEM stands before those folders, for a test.
NAMES = python3.13 python3.12 python3.11 python3.14
FOLDERS = $(SYSTEM)/opt/homebrew/bin $(SYSTEM)/usr/local/bin $(SYSTEM)/Library/Frameworks/Python.framework/Versions/*/bin
PYTHONS = $(or $(PYTHON),python3 $(NAMES) $(foreach folder,$(FOLDERS),$(wildcard $(addprefix $(folder)/,$(NAMES) python3))))

# A file after the other on each of four workers, the longest first (tests/conftest.py). Tests wait for other processes a third of
# their time, so that also two cores have work for them and for the ranks beside them.
PYTEST = pytest -n 4 --dist loadfile --no-loadscope-reorder
MPI_PYTEST = $(BIN)/python -m pytest -x -p no:cacheprovider

.PHONY: help setup train test test-long launch preflight calibrate doctor verdict serve dashboard bench lint coverage docs mutation clean

help:
	@echo "make setup        install what is needed into .venv (EXTRA=cpu, metal or cuda; PYTHON=/path/to/python)"
	@echo "make train        train the quickstart, offline, in about two minutes"
	@echo "make test         the tests, in eight minutes on two cores; make test-long: those that take longer"
	@echo "make doctor       try this machine part by part"
	@echo "make verdict      what works here and how fast it is, in ten minutes: one page, MODEL=folder, HOSTS=hostfile"
	@echo "make preflight    check the machines of HOSTS=hostfile; starts nothing"
	@echo "make calibrate    measure this machine, or those of HOSTS=hostfile"
	@echo "make launch       train on the machines of HOSTS=hostfile"
	@echo "make dashboard    runs in a browser, at the address that it prints"
	@echo "make serve        a finished run behind an OpenAI-compatible server: RUN=runs/NAME"
	@echo "make bench        the quickstart over five seeds, with its controls"
	@echo "make lint | coverage | docs | mutation | clean     for developers of Tandem"
	@echo
	@echo 'Options of the program go into ARGS: make train ARGS="--config configs/X.yaml train.beta=0.2"'
	@echo "All settings: .venv/bin/python train.py --help"

setup: $(INSTALLED)

# Made anew whenever a requirement changes, so that it holds the pinned versions and nothing else.
$(INSTALLED): pyproject.toml constraints.txt
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then exec $$python -P lib/system/installation.py $(EXTRA); fi; \
	done; \
	echo "error: Python 3.11 or newer is needed, and none of $(strip $(PYTHONS)) is (macOS: brew install python@3.13, or python.org); make setup PYTHON=/path/to/python" >&2; exit 2

train: setup
	$(BIN)/python train.py $(ARGS)

# All three parts run, whatever fails in one of them. Tests marked long are test-long's.
test: LENGTH = not long
test-long: LENGTH = long
test test-long: setup
	@status=0; \
	$(BIN)/python -m $(PYTEST) -m "$(LENGTH)" $(ARGS) || status=1; \
	for ranks in 2 3; do $(BIN)/mpirun -n $$ranks $(MPI_PYTEST) -m "$(LENGTH)" || status=1; done; exit $$status

# make launch HOSTS=hostfile ARGS="--config ..." trains on all of them; OPTIONS="--backend mpi --max-restarts 3" is for ./launch.
launch: setup
	./launch --hostfile $(or $(HOSTS),hostfile) $(OPTIONS) -- train.py $(ARGS)

preflight: setup
	./launch --hostfile $(or $(HOSTS),hostfile) --preflight-only $(OPTIONS) -- train.py $(ARGS)

# HOSTS=hostfile measures all hosts, each alone, then together, and the link between them as the training will use it.
calibrate: setup
	$(if $(HOSTS),./launch --hostfile $(HOSTS) $(OPTIONS) --,$(BIN)/python) benchmarks/calibrate.py $(ARGS)

# Can this machine train? A page to attach to a report; ARGS="--json" for programs.
doctor: setup
	$(BIN)/python -m lib.launch.preflight $(ARGS)

# What works here, and how fast it is: a page without names, for an issue. Nothing is sent anywhere.
verdict: setup
	$(BIN)/python -m lib.launch.verdict $(if $(MODEL),--model "$(MODEL)") $(if $(HOSTS),--hosts $(HOSTS)) $(ARGS)

# make serve RUN=runs/NAME ARGS="serve.port=8081 serve.keys=keys"; docs/serving.md
serve: setup
	$(BIN)/python -m lib.server --run $(or $(RUN),$(error make serve RUN=runs/NAME: the folder of a finished run)) $(ARGS)

# make dashboard ARGS="runs/A runs/B --port 8060": the newest run, or these compared, at the address that it prints.
dashboard: setup
	$(BIN)/python -m lib.dashboard $(ARGS)

bench: setup
	$(BIN)/python benchmarks/quickstart.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Of lib/ and train.py, by the tests of one process and of two ranks; build/coverage/index.html shows the lines.
coverage: setup
	@rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m $(PYTEST) $(ARGS)
	$(BIN)/mpirun -n 2 $(BIN)/python -m coverage run -m pytest -x -p no:cacheprovider $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet --directory build/coverage
	$(BIN)/python -m coverage report

# The reference of every module from its docstrings, build/docs/index.html; then every link of the documents and of it.
docs: setup
	@rm -rf build/docs
	$(BIN)/python -m pdoc --docformat google --output-directory build/docs train lib
	REFERENCE=build/docs $(BIN)/python -m pytest -q tests/test_docs.py -k link

mutation: setup
	$(BIN)/python benchmarks/mutation.py $(ARGS)


clean:
	rm -rf build .coverage* .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
