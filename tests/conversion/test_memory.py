"""A conversion's memory does not grow with the model: measured on a gigabyte, in processes of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from folders import make_layered_llama, shard_names

IMPORT = "import sys; from conversion_iha import convert, verify"
CONVERT = f"{IMPORT}; assert convert(*sys.argv[1:]) == []"
VERIFY = f"{IMPORT}; assert verify(*sys.argv[1:], dtypes=()).ok"
# Linux counts the memory of the process that starts another as the other's, so a small one stands between.
MEASURE = """
import os, sys
pid = os.posix_spawn(sys.executable, [sys.executable, "-c", *sys.argv[1:]], os.environ)
_, status, usage = os.wait4(pid, 0)
assert status == 0
print(usage.ru_maxrss)
"""
MARGIN = 200e6


def peak_memory(code: str, *arguments: Path) -> int:
    """Bytes that a process running the code had resident at most."""
    command = [sys.executable, "-c", MEASURE, code, *map(str, arguments)]
    peak = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return peak * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
def test_a_gigabyte_takes_no_more_memory_than_the_imports(tmp_path):
    source, destination = tmp_path / "llama", tmp_path / "iha"
    try:
        make_layered_llama(source, 2048, 8192, 5)
        assert sum((source / shard).stat().st_size for shard in shard_names(source)) > 1e9

        imports = peak_memory(IMPORT)

        assert peak_memory(CONVERT, source, destination) < imports + MARGIN
        assert peak_memory(VERIFY, source, destination) < imports + MARGIN
    finally:
        shutil.rmtree(source)
        shutil.rmtree(destination, ignore_errors=True)
        shutil.rmtree(tmp_path / ".iha.converting", ignore_errors=True)
