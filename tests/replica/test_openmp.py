"""What keeps OpenMP's threads from waiting too long or too briefly: said in time, and no helper left over."""

import argparse
import asyncio
import os
import subprocess
import sys
import threading

import pytest

from replica.engine import Engine
from replica.engine_limits import EngineLimits
from replica.model.load import LoadedModel
from replica.server.openmp import SPINS, bound_spinning
from replica.server.replica_command import run
from tests.replica.serving import replica


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_what_the_operator_says_of_waiting_stands(given: dict[str, str], then: dict[str, str]) -> None:
    environment = dict(given)
    bound_spinning(environment)
    assert environment == then


def test_the_command_says_it_before_the_server_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "replica.server.app", None)
    assert run(argparse.Namespace(config=None, model="tiny", listen=None)) == 1, "no server to import"
    assert os.environ["GOMP_SPINCOUNT"] == SPINS


def test_torch_is_not_imported_before_the_command_runs() -> None:
    program = "import sys, warmroute, replica.server.replica_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_thread_that_loads_is_over_when_the_replica_serves() -> None:
    loaders = []

    def make_engine(model: LoadedModel, limits: EngineLimits, seed: int) -> Engine:
        loaders.append(threading.current_thread())
        return Engine(model, limits, seed)

    async def serve() -> bool:
        async with replica(make_engine=make_engine):
            return loaders[0].is_alive()

    assert asyncio.run(serve()) is False
    assert loaders[0] is not threading.main_thread()
