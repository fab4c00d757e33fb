"""Context parallelism: virtual tokens of a token stay together, and processes in a ring compute what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ring
import torch

from training_iha.parallel import refuse_leaks

RING = Path(ring.__file__)
CASES = {
    "shared": {"num_pseudo_heads": [2, 1, 3]},
    "interleaved": {"num_pseudo_heads": [2, 1, 3], "rope_phases": "interleaved"},
    "windows": {"num_pseudo_heads": 2, "sliding_window": 4},
    "documents": {"num_pseudo_heads": 2, "packed": True},
}


@pytest.mark.slow
def test_a_ring_computes_what_one_process_does_or_refuses(tmp_path):
    processes = 4
    paths = os.pathsep.join([str(RING.parent), str(RING.parents[1] / "modeling_iha")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(RING), str(processes), str(tmp_path), json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]

    results = {name: torch.load(tmp_path / f"{name}.pt") for name in CASES}
    refused = results.pop("windows")["refused"]
    assert "Context parallelism does not support attention layers of type ['sliding_attention']" in refused
    assert "position_ids start over within a row: in a ring" in results.pop("documents")["refused"]
    local = ring.TOKENS // processes
    for case, together in results.items():
        assert "refused" not in together, together
        alone = ring.train(tmp_path, CASES[case], 1)
        assert together["calls"] == [2 * local, local, 3 * local] * ring.STEPS
        assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for ours, theirs in zip(together["gradients"], alone["gradients"], strict=True):
            assert ours.keys() == theirs.keys()
            for name, gradient in theirs.items():
                assert (ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), (case, name)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])}, "position_ids start over"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, "cu_seq_lens_q packs documents"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])}, "attention_mask hides tokens"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask hides tokens"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask hides tokens"),
    ],
)
def test_what_would_leak_is_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        refuse_leaks(inputs)


def test_whole_documents_padded_on_the_right_are_taken():
    refuse_leaks({"input_ids": torch.ones(2, 4)})
    refuse_leaks({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), "position_ids": torch.arange(4)[None]})
