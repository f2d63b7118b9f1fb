"""Shared fixtures: no network, few threads, and a trainer on the tiny model in one line."""

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# two processes of two threads on two cores wait for each other: 507 s, not 191
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"


@pytest.fixture(scope="session")
def shared_data():
    """Folder of real benchmark rows, kept outside the repository; only tests on real rows need it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"real rows are not at {folder}")
    return folder


def pytest_collection_finish(session):
    gc.freeze()  # every training run ends with a collection, and what was imported need not be scanned each time
