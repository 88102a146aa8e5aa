"""Compiles the request path with mypyc where a wheel is built, and the replica's kernel of attention.

Everything else stands in pyproject.toml.

``pip install .`` compiles, ``pip install -e .`` does not: what is edited must be what runs. ``make compile``
compiles in place. Without a C compiler, or with WARMROUTE_PURE=1, the same code runs as plain Python.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

NOT_COMPILED = ("key_hints.py", "kv_events_wire.py", "learned.py", "peer_events.py", "yaml_file.py")
"""Classes that msgspec makes on import or whose types it reads, or with a parent of PyYAML's: mypyc cannot;
words for errors."""
DECIDES = tuple(
    path
    for folder in ("replica/contract", "router/routing")
    for path in Path(folder).rglob("*.py")
    if path.name not in NOT_COMPILED and path.parent.name != "roofline"  # looked at once per replica
)
CARRIES = tuple(
    Path("router/proxy", f"{name}.py")
    for name in (
        "admission",
        "answer",
        "asker",
        "attempt",
        "body_framing",
        "booked",
        "client_connection",
        "cors",
        "counters",
        "crowded_body",
        "entrance",
        "exchange",
        "forwarding",
        "isolation",
        "own_routes",
        "prefill_request",
        "prefill_step",
        "recent",
        "relay",
        "replica_connection",
        "replica_pool",
        "request_head",
        "request_reader",
        "response_head",
        "router_error",
        "service",
        "settings",
        "stream_watch",
        "submission",
        "typed_stream",
        "usage",
        "tenancy",
        "tenant_request",
        "tries",
        "turn_writes",
    )
)
PICKS = Path("router/endpoint_picker/pick.py")
"""It extends ``Submission``: a compiled class takes no subclass that is not."""
KERNEL = "replica/model/_chunk_attention.c"
"""C: attention of a prefill chunk; it must find the OpenMP that torch brings, so Linux alone."""
BUILDS = ("bdist_wheel", "build_ext")


def extensions() -> list[Extension]:
    """The modules of the request path as C extensions, when one is to be built; and the kernel."""
    if os.environ.get("WARMROUTE_PURE") or not any(command in sys.argv for command in BUILDS):
        return []
    from mypyc.build import mypycify

    named = ((DECIDES, "decides"), ((*CARRIES, PICKS), "carries"))
    groups = [(sorted(map(str, paths)), name) for paths, name in named]
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    files = [path for paths, _ in groups for path in paths]
    made: list[Extension] = mypycify(options + files, separate=groups, opt_level="3", debug_level="0")
    if sys.platform != "win32":
        for extension in made:  # modules find each other by a table: nothing but their init need be seen
            extension.extra_compile_args = [*extension.extra_compile_args, "-fvisibility=hidden"]
    if sys.platform == "linux":
        name = KERNEL.removesuffix(".c").replace("/", ".")
        flags = ["-O3", "-fopenmp"]
        # Optional: where it cannot be built, torch's own operations do the same.
        made.append(
            Extension(name, [KERNEL], extra_compile_args=flags, extra_link_args=flags[1:], optional=True)
        )
    return made


class BuildIfPossible(build_ext):
    """Compiles, or says why not and leaves plain Python."""

    def run(self) -> None:
        self.parallel = self.parallel or os.cpu_count()
        try:
            super().run()
        except (CCompilerError, ExecError, PlatformError) as error:
            print(f"warmroute is not compiled, and will use about twice the CPU: {error}", file=sys.stderr)
            self.extensions = []


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildIfPossible})
