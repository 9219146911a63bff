"""The first program of the README runs as it is printed, on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_program_trains(tmp_path: Path) -> None:
    section = README.read_text().split("## One line changes")[1]
    source = re.search(r"```python\n(.*?)```", section, re.S)[1]
    (tmp_path / "train.py").write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("muon: 2 parameters, ") == 2 and "looks like the output head" not in done.stderr
