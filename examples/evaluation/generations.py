"""lm-eval's Hugging Face model, whose generations are written down as they come and read where a run goes on."""

import hashlib
import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm.auto import tqdm
from transformers import GenerationConfig

Key = tuple[str, int, int]  # task, problem, sample
VERSIONS = {name: version(name) for name in ("lm_eval", "torch", "transformers")}  # scores may depend on them
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
        self.folder, self.seed, self.weights = generations, seed, self._weights()
        started = (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        if (self.rank, self.world_size) != started:
            raise ValueError(
                f"process {started[0]} of {started[1]} would be {self.rank} of {self.world_size} for lm-eval, which "
                "spreads over the GPUs of one machine: start one process, or one for each of its GPUs."
            )
        # Only the tokens: a checkpoint's own temperature, penalties and lengths would go into the draws.
        kept = {name: getattr(self.model.generation_config, name) for name in TOKENS}
        self.model.generation_config = GenerationConfig(**kept)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """
        Raises:
            ValueError: the folder holds generations of another model, or of other settings; a prompt is too long.
        """
        keys = _keys(requests)
        wanted = dict(zip(keys, requests, strict=True))
        self._check_lengths(wanted.values())
        size = int(self.batch_size)
        batches = []  # of one task, whose settings are one; the longest first, so that what does not fit fails at once
        for _, pairs in itertools.groupby(sorted(wanted.items(), key=_order), lambda pair: pair[0][0]):
            of_task = list(pairs)
            batches += [of_task[start : start + size] for start in range(0, len(of_task), size)]
        found = self._read({key: self._fingerprint(request) for key, request in wanted.items()})
        with self._open() as file, self.progress(len(wanted)) as progress:
            for batch in batches:
                if not all(key in found for key, _ in batch):
                    torch.manual_seed(zlib.crc32(f"{self.seed} {batch[0][0]}".encode()))
                    texts = super().generate_until([request for _, request in batch], disable_tqdm=True)
                    for (key, request), text in zip(batch, texts, strict=True):
                        if key in found:  # by processes that were more or fewer: what is written stays
                            continue
                        found[key] = text
                        file.write(
                            json.dumps({"key": key, "made_by": self._fingerprint(request), "text": text}) + "\n"
                        )
                    file.flush()
                progress.update(len(batch))
        return [found[key] for key in keys]

    def progress(self, samples: int):
        """A bar over what is asked for."""
        return tqdm(total=samples, desc="samples", disable=self.rank != 0)

    def _weights(self) -> list:
        """A folder's weight files as they are now, or a Hub id and its commit."""
        folder = Path(self.pretrained)
        if not folder.is_dir():
            return [self.pretrained, self.model.config._commit_hash]
        stats = {path.name: path.stat() for path in sorted(folder.glob("*.safetensors"))}
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()]

    def _check_lengths(self, requests: Iterable[Instance]):
        """lm-eval would cut a prompt that is too long, from its start."""
        for text, settings in {request.args[0]: request.args[1] for request in requests}.items():
            tokens, new = len(self.tok_encode(text)), settings["max_gen_toks"]
            if tokens + new > self.max_length:
                raise ValueError(
                    f"--max_new_tokens {new}: with a prompt of {tokens} tokens it is more than the {self.max_length} "
                    f"of {self.pretrained}. At most {self.max_length - tokens} are left."
                )

    def _fingerprint(self, request: Instance) -> str:
        settings = [self.weights, str(self.model.dtype), self.seed, int(self.batch_size), *request.args]
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
    """lm-eval gives a request once for each of its samples; of a process with fewer problems its last one again."""
    seen = Counter()
    keys = []
    for request in requests:
        problem = (request.task_name, request.doc_id)
        keys.append((*problem, seen[problem] % request.repeats))
        seen[problem] += 1
    return keys
