"""Settings of the whole test session: one thread, no deadlines for hypothesis, and the rank pools end with it."""

import os

# Before torch is imported, so that the ranks inherit it: reductions are split by threads, and sums depend on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import torch
from hypothesis import settings

from tests.support import ranks

# A busy machine is no failure; and one commit passes or fails alike each time.
settings.register_profile("suite", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("suite")


def pytest_configure(config):
    torch.set_num_threads(1)


def pytest_sessionfinish(session, exitstatus):
    ranks.shutdown()
