"""lm-eval's Hugging Face model, whose generations are written down as they come and read where a run goes on."""

import hashlib
import itertools
import json
import zlib
from collections import Counter
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm.auto import tqdm

Key = tuple[str, int, int]  # task, problem, sample


class SavingLM(HFLM):
    """
    Batches are the same in every run of the same command, and each has a seed of its own: a run that was killed ends
    as one that was not. lm-eval's own cache leaves sampled generations out.

    Args:
        generations: the folder that they are kept in, a file per process.
        seed: of the draws.
        kwargs: those of `HFLM`; `batch_size` is a number.
    """

    def __init__(self, generations: Path, seed: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.folder, self.seed = generations, seed

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """
        Raises:
            ValueError: the folder holds generations of another model, or of other settings.
        """
        keys = _keys(requests)
        size = int(self.batch_size)
        batches = []  # of one task, whose settings are one; the longest first, so that what does not fit fails at once
        for _, pairs in itertools.groupby(
            sorted(zip(keys, requests, strict=True), key=_order), lambda pair: pair[0][0]
        ):
            of_task = list(pairs)
            batches += [of_task[start : start + size] for start in range(0, len(of_task), size)]
        found = self._read({key: self._fingerprint(request) for key, request in zip(keys, requests, strict=True)})
        with self._open() as file, tqdm(total=len(requests), desc="samples", disable=self.rank != 0) as progress:
            for batch in batches:
                if not all(key in found for key, _ in batch):
                    torch.manual_seed(zlib.crc32(f"{self.seed} {batch[0][0]}".encode()))
                    texts = super().generate_until([request for _, request in batch], disable_tqdm=True)
                    for (key, request), text in zip(batch, texts, strict=True):
                        found[key] = text
                        file.write(
                            json.dumps({"key": key, "made_by": self._fingerprint(request), "text": text}) + "\n"
                        )
                    file.flush()
                progress.update(len(batch))
        return [found[key] for key in keys]

    def _fingerprint(self, request: Instance) -> str:
        settings = [self.pretrained, str(self.model.dtype), self.seed, int(self.batch_size), *request.args]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def _read(self, expected: dict[Key, str]) -> dict[Key, str]:
        found = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if not line.endswith("\n"):
                    break  # of a process that was killed as it wrote
                record = json.loads(line)
                key = tuple(record["key"])
                if key in expected:
                    if record["made_by"] != expected[key]:
                        raise ValueError(
                            f"{path} holds samples of another model, seed, batch size, prompt or settings. "
                            "Name another --output_dir."
                        )
                    found[key] = record["text"]
        return found

    def _open(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.rank}.jsonl"
        if path.exists():
            whole = path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(whole.rfind(b"\n") + 1)
        return path.open("a", encoding="utf-8")


def _order(pair: tuple[Key, Instance]) -> tuple:
    (task, problem, sample), request = pair
    return task, -len(request.args[0]), problem, sample


def _keys(requests: list[Instance]) -> list[Key]:
    """lm-eval gives a request once for each of its samples."""
    seen = Counter()
    keys = []
    for request in requests:
        problem = (request.task_name, request.doc_id)
        keys.append((*problem, seen[problem]))
        seen[problem] += 1
    return keys
