# make train    new environment, then a first run with pictures in out/first (under ten minutes on two CPU cores); again: it goes on
#               STEPS=200 OUT=out/second: how long, and where
# make test     the test suite
# make lint     ruff and mypy
# make bench    a sweep: memory against throughput, predicted beside measured, with raw DeepSpeed and the Trainer as peers
# make clean    remove the environment and the first run

VENV   ?= .venv
PYTHON ?= python3
OUT    ?= out/first
DATA   ?= out/stdlib
STEPS  ?= 60
# Tests wait for ranks, disks and limits half of the time: two files at once fill two cores.
WORKERS ?= 2

# The environment's own bin first: building DeepSpeed's CPU Adam looks for `ninja` there.
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
export DS_BUILD_OPS = 0
# DeepSpeed compiles its CPU Adam on first use. Each environment keeps its own: two that share a cache rebuild it in turns.
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export TOKENIZERS_PARALLELISM = false

# One rank per GPU; without a GPU, two CPU processes that share the cores.
GPUS  := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
RANKS := $(if $(filter 0,$(GPUS)),2,$(GPUS))
# Fused kernels and cuDNN's attention, which a run on a GPU takes where they are installed.
GPU_EXTRA := $(if $(filter 0,$(GPUS)),,-e '.[gpu]')
ifeq ($(GPUS),0)
export DS_ACCELERATOR = cpu
export OMP_NUM_THREADS ?= $(shell n=$$(( $$(nproc) / 2 )); [ $$n -gt 0 ] && echo $$n || echo 1)
endif

.PHONY: train test lint bench clean

JOB = --model_name_or_path preset:llama-tiny --tokenizer_name_or_path $(DATA)/tokenizer --resize_vocab \
      --train_data $(DATA)/train.jsonl --seq_len 256 --per_device_train_batch_size 4 --learning_rate 3e-3

train: $(VENV)/.installed $(DATA)/train.jsonl
	@test ! -e $(OUT)/run.json || echo "$(OUT) holds a run: this one goes on from its last checkpoint. To start over: rm -r $(OUT)"
	@echo "starting $(RANKS) processes: their first line comes when torch and DeepSpeed are loaded, a minute or more the first time"
	deepspeed -q --num_accelerators $(RANKS) launch/train.py --ds_config ds_configs/zero3_offload.json $(JOB) \
	    --max_steps $(STEPS) --lr_scheduler_type cosine --warmup_ratio 0.15 \
	    --eval_data $(DATA)/validation.jsonl --eval_steps 30 --save_steps 30 --save_total_limit 1 \
	    --output_dir $(OUT) --resume_from_checkpoint auto
	@echo "Look at $(OUT)/report.html. For commands of your own: . $(VENV)/bin/activate"

$(DATA)/train.jsonl: | $(VENV)/.installed
	$(BIN)/python -m bigtrain.data.demo stdlib $(DATA)

test: $(VENV)/.installed-dev
	$(BIN)/python -c "from bigtrain import zero; print(zero.why_no_cpu_adam() or 'CPU Adam is built')"
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python launch/benchmark.py launch/grids/$(if $(filter 0,$(GPUS)),cpu_smoke,memory_vs_throughput).yaml --output_dir out/bench

# Python compiles a module when it is first imported, and keeps the result unless it is told not to, as in many containers: then each
# process would compile all of torch. pip would compile thousands of modules that nobody imports, for minutes.
unexport PYTHONDONTWRITEBYTECODE

# Too old a Python is said before an environment is made of it: that would stay, and be taken whatever PYTHON the next call has.
# (Without pip: what Debian's Python leaves where its package python3-venv is missing.)
FOUND = $(firstword $(wildcard $(BIN)/python) $(PYTHON))
define environment
@$(FOUND) -c 'import sys; sys.version_info < (3, 11) and sys.exit("$(FOUND) is Python %s.%s, and bigtrain needs 3.11 or later: \
    remove $(VENV) if it is there, and call make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
test -x $(BIN)/python && test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
endef

$(VENV)/.installed: setup.cfg constraints.txt
	$(environment)
	@echo "installing torch, DeepSpeed and what they need into $(VENV): some minutes, in silence"
	$(BIN)/pip install -q --no-compile -c constraints.txt -e . $(GPU_EXTRA)
	touch $@

$(VENV)/.installed-dev: setup.cfg constraints.txt
	$(environment)
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]' $(GPU_EXTRA)
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) out
