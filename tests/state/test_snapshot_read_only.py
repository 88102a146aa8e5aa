"""A snapshot on a mount that is read-only: a line in the log, and the router serves."""

import asyncio
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fakes.fake_replica import FakeReplica
from tests.fakes.raw_client import RawClient
from tests.fakes.router_process import router_process

READ_ONLY = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro tmpfs "$0" && exec "$@"')
"""The next argument is the folder; what follows runs where that is a read-only mount."""


def _can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*READ_ONLY, str(folder), "true"], capture_output=True, check=False)
    return tried.returncode == 0


def test_a_router_whose_snapshot_cannot_be_written_serves_and_says_so_once(tmp_path: Path) -> None:
    mounted = tmp_path / "state"
    mounted.mkdir()
    if not _can_mount(mounted):
        pytest.skip("needs user namespaces, in which one may mount")

    async def main() -> None:
        replica = FakeReplica()
        await replica.start()
        state = {"kind": "memory", "snapshot": str(mounted / "snapshot"), "snapshot_interval_s": 0.02}
        under = (*READ_ONLY, str(mounted))
        try:
            async with router_process(tmp_path, [replica], under=under, state=state) as router:
                for _ in range(3):
                    assert (await router.ask()).status == 200
                admin = await RawClient.connect(router.admin)
                await admin.post(b"", "/fleet", method="GET")
                told = (await admin.answer()).json()["state"]
                admin.leave()
                assert "Read-only file system" in json.dumps(told)
                router.process.send_signal(signal.SIGTERM)
                assert await router.exit_code() == 0
                lines = [line for line in router.log if "snapshot" in line]
                assert len(lines) == 1 and "cannot be written: Read-only file system" in lines[0]
        finally:
            await replica.stop()

    asyncio.run(main())
